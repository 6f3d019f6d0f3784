"""What the tests with a real engine share: a tiny model, and one SGLang server with a learner in a process of its own."""

import asyncio
import multiprocessing
import os
import socket
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

VOCAB = 112  # above the tokenizer's: sampled ids without text; below SGLang's padding to 128: rows that no one sends


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    """A random Qwen3 with tied embeddings, so wide in its weights that its distributions are far from uniform."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    import pretrain

    tokenizer = pretrain.build_tokenizer(1024)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=True,
            initializer_range=0.15, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id, dtype="float32",
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def be_rank(config, rank: int, port: int):
    """Joins a group of two as torchrun's ranks do, and leaves no trace of it in the environment."""
    import sync

    place = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        return sync.join(config)
    finally:
        for name in place:
            del os.environ[name]


def learner_peer(config, port: int, plan, pipe) -> None:
    """Rank 0: for each (noise, path, version) from the pipe, disturbs the policy, publishes it, and saves what it published."""
    import sync
    import train

    torch.set_num_threads(1)
    ranks = be_rank(config, 0, port)
    policy = train.load_policy(config, ranks)
    generator = torch.Generator().manual_seed(1)
    while True:
        noise, path, version = pipe.recv()
        with torch.no_grad():
            for parameter in policy.parameters():
                local = parameter.to_local()
                local += noise * torch.randn(local.shape, generator=generator)
        parameters = sync.published_parameters(policy.lm)
        sync.send_weights(parameters, plan, ranks, version)
        torch.save({name: sync.full_tensor(p).detach().clone() for name, p in parameters.items()}, path)
        pipe.send("published")


class Engine:
    """A server as an engine rank hosts it (rank 1 of 2, this process), a learner that publishes to it (rank 0), and a
    plain transformers model that holds what the learner published last."""

    def __init__(self, model_dir: str, folder: Path, *more: str):
        from transformers import AutoModelForCausalLM

        import engine
        import rollout
        import sync
        from configs import schema

        self.folder = folder
        overrides = [f"model.path={model_dir}", f"run.dir={folder}", "layout.threads=1", "sync.verify=true", "engine.args.max_total_tokens=32768"]
        self.config = schema.load(None, [*overrides, *more])
        self.prompts = rollout.open_prompts(self.config)
        self.lm = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.plan = sync.plan_buckets(sync.published_shapes(self.lm), "float32", 64 << 10)  # so small that a publication takes several
        self.published = {}

        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.peer = spawn.Process(target=learner_peer, args=(self.config, port, self.plan, theirs), daemon=True)
        self.peer.start()
        self.ranks = be_rank(self.config, 1, port)

        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        (folder / "logs").mkdir()
        state = sync.RunState(self.ranks.store, 0, 1)
        state.create(counted=0, next_ticket=0, redo=[], plan=[])
        self.engine = engine.Engine(self.config, self.ranks, state, model_dir, self.prompts.stop_ids)
        self.server = self.engine.server
        self.wait(self.engine.start())

    def wait(self, coroutine, timeout: float = 300):
        """The result of a coroutine that runs in the server's loop."""
        return self.begin(coroutine).result(timeout)

    def begin(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def publish(self, noise: float = 0.02) -> float:
        """Publishes disturbed weights under the next version; the seconds that the server stood still."""
        path = self.folder / "published.pt"
        self.engine.state.announce(self.server.version + 1)
        self.pipe.send((noise, str(path), self.server.version + 1))
        self.wait(self.load())
        assert self.pipe.poll(60), "the learner did not finish its publication"
        self.pipe.recv()
        self.published = torch.load(path)
        self.lm.load_state_dict(self.published, strict=False)  # the tied head has no entry of its own
        return self.engine.pause

    async def load(self):
        await self.engine.receive(self.server.version + 1, self.plan)
        await self.engine.loading

    async def generate(self, prompt, n, sampling):
        """`n` responses of the server itself: what fails, fails."""
        from server import Draft

        drafts = [Draft() for _ in range(n)]
        await self.server.generate(prompt, drafts, sampling)
        return [draft.response() for draft in drafts]

    def close(self) -> None:
        self.wait(self.server.http.close())
        self.server.stop()
        self.peer.kill()
        self.peer.join()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def engine(model_dir, tmp_path_factory):
    """One server for all tests, with a first publication behind it. Whoever breaks an update must mend it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = Engine(model_dir, tmp_path_factory.mktemp("engine"))
    try:
        engine.publish()
        yield engine
    finally:
        engine.close()
        torch.set_num_threads(threads)
