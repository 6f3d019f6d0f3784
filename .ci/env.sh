#!/usr/bin/env bash
# Prepares the environment; the last line on stdout is the path of its python, everything else goes to stderr.
#
# Two layers, because the packages take 11 GB and minutes to install while a clone should be ready in a second:
#   1. a shared environment per (requirements.txt, Python), outside every clone, with the packages alone;
#   2. .venv/ in this clone, which sees those packages through a .pth file and adds one thing of its own: this clone's
#      sglang_cpu.py, registered as an SGLang platform, so that SGLang's child processes find it.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "env: $*" >&2; }

is_311='import sys; sys.exit(sys.version_info[:2] != (3, 11))'
for base in ${PYTHON:-python3.11 python3 python}; do
    "$base" -c "$is_311" 2>/dev/null && break || base=
done
[ -n "$base" ] || { say "needs Python 3.11: install it, or name it with PYTHON=/path/to/python3.11"; exit 2; }

command -v bwrap >/dev/null || say "hint: code graders need bubblewrap (apt-get install bubblewrap)"

cache=${MODEL_ROCKET_ENVS:-${XDG_CACHE_HOME:-~/.cache}/model-rocket}
key=$({ cat requirements.txt; "$base" -c 'import platform, sys; print(sys.version, platform.machine())'; } |
    sha256sum | cut -c1-16)
shared=$cache/$key
thin=$PWD/.venv
# What the thin layer is made from; a change of any of it remakes the layer.
recipe="$shared $thin $(sha256sum <"$0")"

if [ -e "$shared/.complete" ] && [ "$(cat "$thin/.complete" 2>/dev/null)" = "$recipe" ] &&
    "$thin/bin/python" -c '' 2>/dev/null; then
    echo "$thin/bin/python"
    exit
fi

mkdir -p "$cache"
exec 9>"$cache/$key.lock"
flock --nonblock 9 || { say "waiting for another clone to finish installing $shared"; flock 9; }

if [ ! -e "$shared/.complete" ]; then
    "$base" -c 'import ensurepip' 2>/dev/null ||
        { say "$base has no ensurepip: apt-get install python3.11-venv"; exit 2; }
    say "installing requirements.txt into $shared: about 8 minutes and 11 GB, once per machine"
    rm -rf "$shared" # what an interrupted install left
    "$base" -m venv "$shared" >&2
    "$shared/bin/python" -m pip install --disable-pip-version-check -r requirements.txt >&2
    touch "$shared/.complete"
fi

rm -rf "$thin"
"$shared/bin/python" -m venv --without-pip "$thin"
site=$thin/lib/python3.11/site-packages
echo "import site; site.addsitedir('$shared/lib/python3.11/site-packages')" >"$site/shared.pth"
ln -s ../../../../sglang_cpu.py "$site/sglang_cpu.py"
package=$site/model_rocket_sglang_cpu-1.dist-info
mkdir "$package"
printf 'Metadata-Version: 2.1\nName: model-rocket-sglang-cpu\nVersion: 1\n' >"$package/METADATA"
printf '[sglang.srt.platforms]\nmodel_rocket_cpu = sglang_cpu:activate\n' >"$package/entry_points.txt"
printf 'sglang_cpu.py,,\n%s/METADATA,,\n%s/entry_points.txt,,\n%s/RECORD,,\n' \
    "${package##*/}" "${package##*/}" "${package##*/}" >"$package/RECORD"
printf '#!/bin/sh\nexec "$(dirname "$0")/python" -m pytest "$@"\n' >"$thin/bin/pytest"
cat >"$thin/bin/torchrun" <<END
#!$thin/bin/python
"""torchrun, but a failed job has the exit code of the rank that failed first, and that rank's own words are the last. A job
that is started again is told why, in \$MODEL_ROCKET_AFTER."""
import logging
import os
import sys

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

look = LocalElasticAgent._monitor_workers


def end_of(rank, code):
    return f"rank {rank} was ended by signal {-code}" if code < 0 else f"rank {rank} ended with exit code {code}"


def look_and_tell(agent, group):
    result = look(agent, group)
    if result.failures:
        os.environ["MODEL_ROCKET_AFTER"] = "; ".join(end_of(rank, f.exitcode) for rank, f in result.failures.items())
    return result


LocalElasticAgent._monitor_workers = look_and_tell
logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
try:
    main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        print(f"error: {end_of(rank, failure.exitcode)}", file=sys.stderr)
    sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
except SignalException as signal:
    sys.exit(f"stopped: {signal}")
END
chmod +x "$thin/bin/pytest" "$thin/bin/torchrun"
echo "$recipe" >"$thin/.complete"
echo "$thin/bin/python"
