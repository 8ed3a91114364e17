#!/bin/sh
# Starts the host's Python {version}. Its path is in the file `interpreter`, which is no input of any
# action: the same version at another path reuses every cached result.
self=$(readlink -f "$0")
IFS= read -r python <"${self%/*}/interpreter"
if [ ! -x "$python" ]; then
  echo "Python {version} must be at $python, where the build found it, but is not; run \`./bazelw sync --only=stoneware_python\`." >&2
  exit 1
fi
exec "$python" "$@"
