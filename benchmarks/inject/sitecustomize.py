"""Faults that strike from within the processes of a run. benchmarks/chaos.py puts this folder on PYTHONPATH; the product
knows nothing of it.

Python imports this module at the start of every process of the run. It waits for three others to be imported, and changes
them: the web server of an engine, the sockets of a rank, the graders of a grader's worker. A fault then strikes once for
every file FAULT.N in the folder $CHAOS_TRIGGERS: whoever takes the file away does it, so that no two processes do.
"""

import os
import signal
import sys
import time
from importlib.machinery import PathFinder

TRIGGERS = os.environ.get("CHAOS_TRIGGERS", "")
GARBAGE = (b"\x00\xff not json at all", b'data: {"index": 0, "output_ids": [1, 2\n\n', b'data: {"index": 99, "text": "no"}\n\n')
UPDATE = (  # the five steps of a weight update, as engine.Engine.load asks for them
    "/pause_generation", "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update",
    "/continue_generation",
)  # fmt: skip
WHOLE = 9  # pieces of an answer, at most, that arrive before the connection is cut
GROUP_BYTES = 1000  # a message above it carries rollouts


def strikes(fault: str) -> bool:
    """Whether this fault happens here and now; not again, unless there is another file."""
    for name in os.listdir(TRIGGERS):
        if name.partition(".")[0] == fault:
            try:
                os.unlink(os.path.join(TRIGGERS, name))
            except FileNotFoundError:
                continue  # another process was faster
            return True
    return False


def change_server(uvicorn_config) -> None:
    """An engine that answers wrongly, or dies at a step of a weight update."""
    load = uvicorn_config.Config.load

    def load_faulty(self):
        load(self)
        self.loaded_app = faulty(self.loaded_app)

    uvicorn_config.Config.load = load_faulty


def faulty(app):
    async def serve(scope, receive, send):
        path = scope.get("path")  # the start and the end of the server have none
        if path == "/generate" and strikes("http_500"):
            return await reply(send, 500, b"injected")
        if path == "/generate" and strikes("http_garbage"):
            return await reply(send, 200, GARBAGE[time.time_ns() // 1000 % len(GARBAGE)])
        if path == "/generate" and strikes("http_cut"):
            return await app(scope, receive, cutting(send))
        if path in UPDATE and strikes(f"kill_in_update_{UPDATE.index(path) + 1}"):
            os.killpg(0, signal.SIGKILL)
        await app(scope, receive, send)

    return serve


async def reply(send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": body})


def cutting(send):
    """Sends the first pieces of an answer and half of the next; uvicorn then closes the connection, for the answer lacks
    its end."""
    left = WHOLE

    async def cut(message):
        nonlocal left
        if message["type"] == "http.response.body":
            left -= 1
        if left >= 0 and message.get("more_body", True):
            return await send(message)
        await send(message | {"body": message["body"][: len(message["body"]) // 2], "more_body": True})
        raise ConnectionResetError("injected")

    return cut


def change_socket(zmq_socket) -> None:
    """A rank whose messages to the learner arrive cut in half."""
    send = zmq_socket.Socket.send

    def send_cut(self, data, *args, **options):
        if isinstance(data, bytes) and len(data) > GROUP_BYTES and strikes("truncated_message"):
            data = data[: len(data) // 2]
        return send(self, data, *args, **options)

    if "RANK" in os.environ:  # the sockets within an engine are left alone
        zmq_socket.Socket.send = send_cut


def change_graders(rewards) -> None:
    """Graders in worker processes that hang or raise."""
    from dataclasses import replace

    def faulty_score(score):
        def faulty(text, answer):
            if strikes("grader_hang"):
                time.sleep(3600)
            if strikes("grader_raise"):
                raise RuntimeError("injected")
            return score(text, answer)

        return faulty

    for name, grader in rewards.GRADERS.items():
        if grader.isolated:
            rewards.GRADERS[name] = replace(grader, score=faulty_score(grader.score))


CHANGES = {"uvicorn.config": change_server, "zmq.sugar.socket": change_socket, "rewards": change_graders}


class Finder:
    """Finds those modules as ever, and changes them once they are loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name in CHANGES else None
        if spec:
            load = spec.loader.exec_module

            def load_and_change(module):
                load(module)
                CHANGES[name](module)

            spec.loader.exec_module = load_and_change
        return spec


if TRIGGERS:
    sys.meta_path.insert(0, Finder)
