#!/usr/bin/env bash
# The numeric tests on WebGPU, each result within 1e-5 of the CPU's (tests/second_device.py).
#
#     tests/webgpu.sh [WORDS FOR PYTEST]        with the `python` on PATH, which needs .[test,webgpu]
#     tests/webgpu.sh -- COMMAND                another command with that driver: lsuv doctor --device webgpu
#
# Where there is no GPU, a software Vulkan driver (Mesa's lavapipe 25) comes from Debian's packages into a temporary
# folder; nothing is installed. LSUV_VULKAN=FOLDER keeps it there for the next time. Where that cannot be had, the tests are
# skipped with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."

adapter() { # prints why there is none, and fails
    python - 2>/dev/null <<'PYTHON'
from lsuv_cli.errors import LsuvError
from lsuv_cli.scaling.devices import open_device
try:
    open_device("webgpu")
except LsuvError as problem:
    print(problem)
    raise SystemExit(1)
PYTHON
}

skip() {
    echo "skipped: no tests on WebGPU: $*"
    exit 0
}

driver() { # puts the driver and what it needs into $folder
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    local lists="$folder/lists" cache="$folder/cache" options=()
    mkdir -p "$lists/partial" "$cache/archives/partial" "$folder/root"
    options=(-qq -o Dir::Cache="$cache" -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Acquire::Languages=none)
    # shellcheck disable=SC1091
    source /etc/os-release
    if [[ $ID == debian ]]; then # the mesa of bookworm itself is too old
        local suite mirror # the one that this system takes its packages from
        mirror=$(apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
            awk -v suite="$VERSION_CODENAME" '$2 == suite { print $1; exit }')
        [[ -n $mirror ]] || return 1
        for suite in "$VERSION_CODENAME" "$VERSION_CODENAME-backports"; do
            echo "deb $mirror $suite main"
        done >"$folder/sources.list"
        options+=(-o Dir::Etc::SourceList="$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null
            -o Dir::State::Lists="$lists" -t "$VERSION_CODENAME-backports")
        timeout 120 apt-get "${options[@]}" update >/dev/null || return 1
    fi
    timeout 120 apt-get "${options[@]}" install --reinstall --download-only --no-install-recommends -y \
        mesa-vulkan-drivers libvulkan1 >/dev/null || return 1
    local package
    for package in "$cache"/archives/*.deb; do
        dpkg -x "$package" "$folder/root"
    done
    local library
    library=$(find "$folder/root" -name libvulkan_lvp.so | head -1)
    [[ -n $library ]] || return 1
    printf '{"ICD": {"api_version": "1.3.0", "library_path": "%s"}, "file_format_version": "1.0.0"}\n' "$library" \
        >"$folder/driver.json"
}

if ! reason=$(adapter); then
    [[ $reason != *"pip install"* ]] || skip "$reason"
    folder=${LSUV_VULKAN:-$(mktemp -d)}
    [[ -n ${LSUV_VULKAN:-} ]] || trap 'rm -rf "$folder"' EXIT
    [[ -f $folder/driver.json ]] || driver || skip "$reason; and no software Vulkan driver could be fetched"
    library=$(find "$folder/root" -name libvulkan_lvp.so | head -1)
    export VK_DRIVER_FILES="$folder/driver.json" LD_LIBRARY_PATH="$(dirname "$library"):${LD_LIBRARY_PATH:-}"
    export ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1
    reason=$(adapter) || skip "$reason"
fi
if [[ ${1:-} == -- ]]; then
    "${@:2}"
    exit
fi
export LSUV_TEST_DEVICE=webgpu
files=(tests/scaling/test_{devices,stages,precision,moments}.py tests/test_{init,random_graphs}.py tests/data/test_batches.py)
[[ $* == *tests/* ]] && files=() # the words name some
python -m pytest "$@" "${files[@]}"
