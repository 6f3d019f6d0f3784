"""Trajectories: what a rollout is, how it is checked, and its way to the learner, on which nothing is lost and nothing comes
twice.

    Rollout, Group         token ids as sampled, with mask, behaviour logprob and version of each
    EvalPart, EngineStats  what else engine ranks tell the learner
    encode, decode         messages as bytes (msgpack); kept ids are packed
    Inbox, Outbox          their transport to rank 0 (ZeroMQ)
"""

import hashlib
import json
import math
import secrets
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Iterator, Optional

import msgspec
import numpy as np
import zmq

from routing import Routing

if TYPE_CHECKING:
    from sync import Ranks

# ------------------------------------------------------------------------------------------------------------- rollouts


class Rollout(msgspec.Struct):
    """One response with its prompt: token ids as sampled, never re-tokenised text.

    tokens, mask, behaviour_logp, versions: [T] over prompt + response. mask is 1 where a token was sampled by the
    policy (the end-of-sequence token included); only there behaviour_logp and versions mean something.
    kept_counts [T], kept_ids [sum of kept_counts]: the ids that the sampler kept at each sampled token, ascending (mask
    replay).
    experts [T - 1, layers, top_k]: where the engine routed each token but the last, which it never computed
    (routing replay).
    """

    tokens: np.ndarray  # int32
    mask: np.ndarray  # uint8
    behaviour_logp: np.ndarray  # float32
    versions: np.ndarray  # int32, -1 where mask is 0
    text: str
    finish: str  # stop | length
    task: float  # the grader's raw score
    reward: float = 0.0
    parts: dict[str, float] = {}
    failure: Optional[str] = None  # why grading failed, where it did (the score is then 0)
    kept_counts: Optional[np.ndarray] = None  # uint16
    kept_ids: Optional[np.ndarray] = None  # int32
    experts: Optional[np.ndarray] = None  # uint8, or uint16 above 256 experts

    def check(self, vocab_size: int, routing: Optional[Routing] = None) -> None:
        """Raises ValueError if the parts of the rollout do not fit together: nothing is padded or guessed."""
        lengths = {len(self.tokens), len(self.mask), len(self.behaviour_logp), len(self.versions)}
        sampled = self.mask == 1
        if len(lengths) != 1 or not sampled.any():
            raise ValueError(f"rollout with parts of lengths {sorted(lengths)} and {int(sampled.sum())} sampled tokens")
        if sampled[0] or self.mask.max() > 1:
            raise ValueError(f"rollout whose mask is no prompt of 0 and samples of 1: {self.mask[:20]}")
        if self.tokens.min() < 0 or self.tokens.max() >= vocab_size:
            raise ValueError(f"rollout with token ids {self.tokens.min()}..{self.tokens.max()}, vocabulary {vocab_size}")
        logp = self.behaviour_logp[sampled]
        if not np.isfinite(logp).all() or logp.max() > 1e-4:
            raise ValueError(f"rollout with behaviour logprobs {logp.min()}..{logp.max()}")
        if self.versions[sampled].min() < 0:
            raise ValueError("rollout with a sampled token of unknown version")
        if not np.isfinite([self.task, self.reward]).all():
            raise ValueError(f"rollout with task score {self.task} and reward {self.reward}")
        if (self.experts is None) != (routing is None):
            raise ValueError(f"rollout {'with' if routing is None else 'without'} routed experts")
        if routing is not None:
            routing.check(self.experts, len(self.tokens) - 1)
        if self.kept_counts is None and self.kept_ids is None:
            return
        if self.kept_counts is None or self.kept_ids is None or len(self.kept_counts) != len(self.tokens):
            raise ValueError("rollout with kept ids or their counts missing")
        counts = self.kept_counts[sampled].astype(np.int64)
        if counts.min() < 1 or counts.sum() != len(self.kept_ids):
            raise ValueError("rollout whose kept ids do not cover its sampled tokens")
        if self.kept_ids.min() < 0 or self.kept_ids.max() >= vocab_size:
            raise ValueError(f"rollout with kept ids {self.kept_ids.min()}..{self.kept_ids.max()}, vocabulary {vocab_size}")
        begins = np.cumsum(counts) - counts
        if (np.delete(np.diff(self.kept_ids), begins[1:] - 1) < 1).any():  # a double would count twice in the softmax
            raise ValueError("rollout with kept ids that do not ascend")
        is_own = self.kept_ids == np.repeat(self.tokens[sampled], counts)
        if not np.logical_or.reduceat(is_own, begins).all():
            raise ValueError("rollout with a sampled token that is not among its kept ids")

    @property
    def oldest_version(self) -> int:
        return int(self.versions[self.mask == 1].min())


class Group(msgspec.Struct, tag=True):
    """The rollouts of one prompt."""

    ticket: int
    engine: int
    prompt_id: str
    source: str
    prompt: str | list[dict]
    rollouts: list[Rollout]
    dropped: Optional[str] = None  # why it will not be learned from
    stage: int = 0  # of the length curriculum, whose limits it had from begin to end
    masks: Optional[bytes] = None  # on the way only: the kept ids of all rollouts (pack_masks)
    mask_bytes: int = 0  # that these took

    @property
    def oldest_version(self) -> int:
        return min(rollout.oldest_version for rollout in self.rollouts)


class EvalPart(msgspec.Struct, tag=True):
    """One engine's share of an evaluation."""

    eval_id: int
    engine: int
    version: int
    sources: list[str]  # one per prompt
    passed: list[float]  # mean pass rate of each prompt over its k samples


class EngineStats(msgspec.Struct, tag=True):
    """Running totals of an engine rank; the learner logs differences."""

    engine: int
    wall: float = 0.0  # seconds since the engine was ready
    busy: float = 0.0  # of these with at least one request running
    tokens: int = 0  # sampled
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV was in the prefix cache
    pause: float = 0.0  # seconds that the server stood still in its last weight update
    serving: bool = True
    restarts: int = 0  # of the server
    retried: int = 0  # responses of this rank that another engine, or a restarted one, had to finish
    memory_gb: float = 0.0  # resident, of the server's processes


Message = Group | EvalPart | EngineStats


# ------------------------------------------------------------------------------------------------------- as bytes


def pack_masks(rollouts: list[Rollout]) -> bytes:
    """The kept ids of rollouts that have them, for the way: a count per sampled token (uint16), then per id its distance
    from the one before (from -1 at a token's first), byte plane by byte plane, all deflated."""
    counts = np.concatenate([r.kept_counts[r.mask == 1] for r in rollouts])
    ids = np.concatenate([r.kept_ids for r in rollouts])
    steps = np.diff(ids, prepend=-1)
    begins = (np.cumsum(counts, dtype=np.int64) - counts)[1:]
    steps[begins] = ids[begins] + 1
    planes = steps.astype("<u4").view(np.uint8).reshape(-1, 4).T
    return zlib.compress(counts.astype("<u2").tobytes() + planes.tobytes())


def unpack_masks(packed: bytes, rollouts: list[Rollout]) -> None:
    """Gives `rollouts` the kept ids that `pack_masks` packed. Raises msgspec.DecodeError if they do not fit."""
    where = [np.flatnonzero(r.mask == 1) for r in rollouts]
    n = sum(map(len, where))
    try:
        inflate = zlib.decompressobj()
        content = inflate.decompress(packed, n * (2 + 4 * 65536))  # no token keeps more ids than a count can say
        counts = np.frombuffer(content, "<u2", n).astype(np.int64)
        planes = np.frombuffer(content, np.uint8, 4 * counts.sum(), 2 * n)
    except (zlib.error, ValueError) as error:
        raise msgspec.DecodeError(f"masks of {n} tokens: {error}") from error
    if len(content) != 2 * n + len(planes) or not inflate.eof or inflate.unused_data:
        raise msgspec.DecodeError(f"masks of {n} tokens: {len(content)} bytes instead of {2 * n + len(planes)}")
    steps = planes.reshape(4, -1).T.copy().view("<u4")[:, 0].astype(np.int64)
    ends = np.cumsum(counts)
    before = np.concatenate([[0], np.cumsum(steps)])[ends - counts]  # of each token's first
    ids = (np.cumsum(steps) - np.repeat(before, counts) - 1).astype(np.int32)
    at = np.cumsum([0, *map(len, where)])
    for r, mine, i, j in zip(rollouts, where, at[:-1], at[1:]):
        r.kept_counts = np.zeros(len(r.mask), np.uint16)
        r.kept_counts[mine] = counts[i:j]
        r.kept_ids = ids[ends[i] - counts[i] : ends[j - 1]]


def _packed(group: Group) -> Group:
    """A group whose masks travel compactly; all of its rollouts have some, or none."""
    have = [r.kept_ids is not None for r in group.rollouts]
    if not any(have):
        return group
    if not all(have):
        raise ValueError(f"group {group.ticket}: {sum(have)} of {len(have)} rollouts have kept ids")
    rollouts = [msgspec.structs.replace(r, kept_counts=None, kept_ids=None) for r in group.rollouts]
    return msgspec.structs.replace(group, rollouts=rollouts, masks=pack_masks(group.rollouts))


def _unpacked(group: Group) -> Group:
    if group.masks is not None:
        unpack_masks(group.masks, group.rollouts)
        group.masks, group.mask_bytes = None, len(group.masks)
    return group


def _to_wire(array) -> tuple:
    if isinstance(array, np.ndarray):
        return array.dtype.str, array.tobytes(), *array.shape
    raise NotImplementedError(type(array))


def _from_wire(kind, parts):
    dtype, content, *shape = parts
    return np.frombuffer(content, dtype=np.dtype(dtype)).reshape(shape or -1)  # older checkpoints name no shape


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=_from_wire)
_group_decoder = msgspec.msgpack.Decoder(list[Group], dec_hook=_from_wire)


def encode(message: Message | list[Group]) -> bytes:
    if isinstance(message, list):
        return _encoder.encode([_packed(group) for group in message])
    return _encoder.encode(_packed(message) if isinstance(message, Group) else message)


def decode(content: bytes) -> Message:
    """Raises msgspec.DecodeError (ValidationError included) on anything that is not a whole, well-typed message."""
    message = _decoder.decode(content)
    return _unpacked(message) if isinstance(message, Group) else message


def decode_groups(content: bytes) -> list[Group]:
    return [_unpacked(group) for group in _group_decoder.decode(content)]


# ------------------------------------------------------------------------------------------------------- transport

# Groups and EvalParts are numbered from 1, per engine and per start of the job, and kept by their sender until the
# inbox has acknowledged them. An EngineStats is not: the next one replaces it. A message is two frames: its body, and
# before it a header (engine, sequence, answered, checksum of all four under the inbox's key).
#   sequence  its number; of an EngineStats: that of the last numbered message before it, so that a loss shows even
#             where no further group follows
#   answered  the last round of requests that its sender had answered in full before it
# The inbox answers through the store, in one key per engine, so that nobody reads half an answer:
#   receipt/{engine}  [last, [[sequence, round], ...]]: every number up to `last` is in but for those listed, which are
#                     asked for again, in rounds that count up
# What one engine sends comes in order. So a message is lost that is not here when a later one is, and its resend is
# lost if it is not here when something is that was sent after that round was answered: no clock has to say what late
# means. Where order fails after all (a connection that broke and came back), one comes twice, and is dropped once.

RESENDS = 5  # times that one message is asked for again until the run is given up
LOOK_EVERY = 0.25  # seconds between an outbox's looks at its receipt

_header_decoder = msgspec.msgpack.Decoder(tuple[int, int, int, bytes])


def _checksum(key: bytes, engine: int, sequence: int, answered: int, body: bytes) -> bytes:
    digest = hashlib.blake2b(f"{engine} {sequence} {answered}:".encode(), digest_size=8, key=key)
    digest.update(body)
    return digest.digest()


@dataclass
class Received:
    """What the inbox has of one engine's numbered messages."""

    last: int = 0  # the highest number that it knows of
    missing: dict[int, int] = field(default_factory=dict)  # what of 1..last is not here -> the round that asks for it
    times: dict[int, int] = field(default_factory=dict)  # what is missing -> how often it was asked for
    round: int = 0  # the last one that was asked
    receipt: str = ""  # as it stands in the store
    heard: float = 0.0  # time.monotonic() when its last message was taken out


class Inbox:
    """Rank 0's end of the trajectory transport. A numbered message comes out of it exactly once, whole.

    What waits in it is bounded by the limits of the outboxes; its socket needs none.
    """

    def __init__(self, ranks: "Ranks"):
        self.store, self.record = ranks.store, ranks.record
        self.received: dict[int, Received] = {}  # by engine
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.set_hwm(0)
        port = self.socket.bind_to_random_port(f"tcp://{ranks.host}")
        self.key = secrets.token_bytes(16)  # what does not come from this attempt of the job is garbled
        self.store.set("inbox", json.dumps([f"tcp://{ranks.host}:{port}", self.key.hex()]))

    def receive(self, timeout: float) -> Iterator[Message]:
        """What has arrived; waits up to `timeout` seconds for the first message. Acknowledged once all is taken out.

        Raises RuntimeError where a message is still missing after RESENDS requests.
        """
        if not self.socket.poll(int(timeout * 1000)):
            return
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = self.open(frames)
            if message is not None:
                yield message
        for engine, received in self.received.items():
            self.acknowledge(engine, received)

    def open(self, frames: list[bytes]) -> Optional[Message]:
        """The message; None where it is garbled, which is as good as lost, or was here before."""
        engine = sequence = None
        try:
            header, body = frames
            engine, sequence, answered, checksum = _header_decoder.decode(header)
            if checksum != _checksum(self.key, engine, sequence, answered, body):
                raise ValueError(f"the checksum does not fit its {len(body)} bytes")
            message = decode(body)
        except (ValueError, msgspec.DecodeError) as error:
            self.record("garbled_message", engine=engine, sequence=sequence, why=str(error)[:200])
            return None
        received = self.received.setdefault(engine, Received())
        received.heard = time.monotonic()
        for n in range(received.last + 1, sequence + 1):
            received.missing[n] = received.round + 1
        received.last = max(received.last, sequence)
        is_new = True
        if not isinstance(message, EngineStats):
            is_new = received.missing.pop(sequence, None) is not None
            received.times.pop(sequence, None)
        for n, round in received.missing.items():
            if round <= answered:  # what was sent again did not come through either
                received.missing[n] = received.round + 1
        return message if is_new else None

    def acknowledge(self, engine: int, received: Received) -> None:
        """Writes the engine's receipt, where it has changed."""
        wanted = [n for n, round in received.missing.items() if round > received.round]
        received.round += bool(wanted)
        for n in wanted:
            received.times[n] = times = received.times.get(n, 0) + 1
            if times > RESENDS:
                raise RuntimeError(f"message {n} of engine {engine} did not come through, though sent {times} times")
            self.record("missing_message", engine=engine, sequence=n, times=times)
        receipt = json.dumps([received.last, sorted(received.missing.items())])
        if receipt != received.receipt:
            self.store.set(f"receipt/{engine}", receipt)
            received.receipt = receipt

    def is_complete(self, since: float) -> bool:
        """Whether every engine has been heard after `since` (time.monotonic()) and nothing of it is missing."""
        return all(r.heard > since and not r.missing for r in self.received.values())


class Outbox:
    """An engine rank's end: keeps what it sends until the inbox has it.

    Sending never blocks and never fails, for the socket has no limit of its own: `limit` bounds what waits. A rank
    whose outbox `is_full` must begin no group; those under way are still sent. (An EngineStats is some 100 bytes twice
    a second, for at most the faults.stall_after seconds that a learner may be away.)
    """

    def __init__(self, ranks: "Ranks", limit: int):
        self.store, self.record, self.engine, self.limit = ranks.store, ranks.record, ranks.role.engine, limit
        self.sequence = 0  # of the last numbered message
        self.answered = 0  # the last round of requests that was answered
        self.kept: dict[int, bytes] = {}  # bodies that are not acknowledged, by number
        self.looked = -math.inf  # time.monotonic() of the last look at the receipt
        self.store.set(f"receipt/{self.engine}", json.dumps([0, []]))  # nobody writes it before a message is there
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.set_hwm(0)
        # Once a rank closes this, the learner has saved without what is still on the way, or is gone.
        self.socket.setsockopt(zmq.LINGER, 0)
        url, key = json.loads(self.store.get("inbox"))
        self.key = bytes.fromhex(key)
        self.socket.connect(url)

    @property
    def is_full(self) -> bool:
        return len(self.kept) >= self.limit

    def send(self, message: Message) -> None:
        body = encode(message)
        if not isinstance(message, EngineStats):
            self.sequence += 1
            self.kept[self.sequence] = body
        self.post(self.sequence, body)

    def post(self, sequence: int, body: bytes) -> None:
        checksum = _checksum(self.key, self.engine, sequence, self.answered, body)
        header = msgspec.msgpack.encode((self.engine, sequence, self.answered, checksum))
        self.socket.send_multipart([header, body], zmq.NOBLOCK, copy=False)  # no copy: waiting and kept are one memory

    def pump(self) -> None:
        """Forgets what the inbox has and sends again what it asks for. To be called often; looks at the store every
        LOOK_EVERY seconds, and each time while full."""
        now = time.monotonic()
        if not self.kept or now < self.looked + LOOK_EVERY and not self.is_full:
            return
        self.looked = now
        last, missing = json.loads(self.store.get(f"receipt/{self.engine}"))
        rounds = dict(missing)
        self.kept = {n: body for n, body in self.kept.items() if n > last or n in rounds}
        for n, round in rounds.items():
            if round > self.answered:
                self.record("resend", engine=self.engine, sequence=n, round=round)
                self.post(n, self.kept[n])
        self.answered = max([self.answered, *rounds.values()])  # only now: the resends themselves do not say so

    def close(self) -> None:
        """Returns at once."""
        self.socket.close()
