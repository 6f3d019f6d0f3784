"""A stand-in for an SGLang server that is up in a second and fails on demand: python fake_sglang.py --port N ...

Its next token is a function of all before it, so a response that several servers have sampled in turn is the one that a
single server would have given. POST /behave {"mode": ...} says how it goes on:
    ok | 500 | garbage | other (answers for a longer prompt) | cut (the connection, after three tokens)
    | slow (a second before each token) | die (after three tokens) | die:/path (when that path is asked for)
    | poison (dies on any request whose prompt starts with token 13)
    | refuse (500 to all but probes) | refuse:/path (400 where that path is asked for) | mute (no token, all else)
    | version:V (says V of its tokens) | slow calls (half a second before the answer to each but /generate)
"""

import argparse
import asyncio
import base64
import hashlib
import json
import os
import signal

from aiohttp import web


def next_token(ids: list[int]) -> int:
    return hashlib.sha256(str(ids).encode()).digest()[0] % 90 + 5


class Server:
    def __init__(self, interval: int):
        self.interval = interval
        self.mode = "ok"
        self.version = "default"
        self.running = asyncio.Event()
        self.running.set()
        self.held: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.keys: list[str] = []  # that keep the prefix caches of requests apart

    def die(self):
        os.killpg(0, signal.SIGKILL)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        self.calls.append(request.path)
        if self.mode == f"die:{request.path}":
            self.die()
        if self.mode == f"refuse:{request.path}":
            return web.Response(status=400, text="no")
        if request.path == "/generate":
            return await self.generate(request)
        body = await request.json() if request.can_read_body else {}
        if self.mode == "slow calls":
            await asyncio.sleep(0.5)
        if request.path == "/behave":
            self.mode = body["mode"]
        elif request.path == "/pause_generation":
            self.running.clear()
        elif request.path == "/continue_generation":
            self.running.set()
        elif request.path == "/update_weights_from_tensor":
            for name, content in json.loads(body["serialized_named_tensors"][0]).items():
                self.held[name] = base64.b64decode(content)
            self.version = body["weight_version"]
        elif request.path == "/weights_checker":
            sums = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in self.held.items()}
            return web.json_response({"ranks": [{"checksums": sums, "parallelism_info": [{"tp_rank": 0}]}]})
        return web.json_response({"success": True, "version": self.version, "calls": self.calls, "keys": self.keys})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.keys.append(body["extra_key"])
        if self.mode == "500" or self.mode == "refuse" and body["input_ids"] != [[0]]:
            return web.Response(status=500, text="out of luck")
        if self.mode == "poison" and body["input_ids"][0][0] == 13:
            self.die()
        reply = web.StreamResponse()
        await reply.prepare(request)
        await asyncio.gather(*(
            self.one(reply, i, list(prompt), body["sampling_params"][i]["max_new_tokens"])
            for i, prompt in enumerate(body["input_ids"])
        ))  # fmt: skip
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def one(self, reply, index: int, prompt: list[int], limit: int) -> None:
        ids, versions, sent = [], [], 0
        for n in range(1, limit + 1):
            await asyncio.sleep(1.0 if self.mode == "slow" else 0.01)
            await self.running.wait()
            if self.mode == "mute":
                await asyncio.sleep(1000)
            ids.append(next_token(prompt + ids))
            said = self.mode.partition(":")[2] if self.mode.startswith("version:") else self.version
            versions.append(said)
            done = n == limit
            if not done and n > 1 and n - sent < self.interval:
                continue
            spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(versions)]
            answer = {
                "output_ids": ids[sent:], "index": index,
                "meta_info": {
                    "finish_reason": {"type": "length"} if done else None, "cached_tokens": 0,
                    "prompt_tokens": len(prompt) + (self.mode == "other"),
                    "weight_version": said, "weight_versions": spans if done else None,
                    "output_token_logprobs": [[-0.5, t, None] for t in ids[sent:]],
                },
            }  # fmt: skip
            sent = n
            if self.mode == "garbage":
                await reply.write(b'data: {"output_ids": "yes", "meta_info": 7}\n\n')
                return
            await reply.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
            if n >= 3 and self.mode == "cut":
                reply._req.transport.abort()
                return
            if n >= 3 and self.mode == "die":
                self.die()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--stream-interval", type=int)
    args, _ = parser.parse_known_args()
    server = Server(args.stream_interval)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", server.respond)
    print("the fake server is up", flush=True)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, reuse_address=True)


if __name__ == "__main__":
    main()
