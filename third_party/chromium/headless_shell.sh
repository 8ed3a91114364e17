#!/bin/sh
# Chromium's headless shell with the libraries and fonts it came with; arguments are Chromium's.
# Beside this file lies `tree` (fetch_chromium.py). The profile is a fresh folder of the test's own,
# which Bazel removes.
set -eu
tree=$(dirname -- "$(readlink -f -- "$0")")/tree
profile=$(mktemp -d "${TEST_TMPDIR:-${TMPDIR:-/tmp}}/chromium.XXXXXX")
export HOME="$profile" XDG_CACHE_HOME="$profile" XDG_CONFIG_HOME="$profile"
export FONTCONFIG_FILE="$tree/fonts.conf" LD_LIBRARY_PATH="$tree/lib"
# No sandbox of its own: with one it refuses to start as root, and pages are the tests' own files.
# Shared memory in files: containers often have a /dev/shm of 64 MB.
exec "$tree/chromium/chromium-headless-shell" \
  --no-sandbox --disable-gpu --disable-dev-shm-usage --user-data-dir="$profile" "$@"
