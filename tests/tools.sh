#!/bin/sh
# System programs that some tests use. A test whose program is missing is skipped with a message.
# With CI=true, as root and with apt-get, missing programs are installed. Otherwise they are listed.
set -u

packages=
for tool in prometheus=prometheus chromium=chromium ip=iproute2 docker-compose=docker-compose \
    g++=g++; do
    command -v "${tool%=*}" > /dev/null || packages="$packages ${tool#*=}"
done
[ -n "$packages" ] || exit 0

if [ "${CI:-}" != true ] || [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "some tests will be skipped without: apt-get install --no-install-recommends$packages"
    exit 0
fi

# Debian starts a service when its package is installed, unless this file forbids it.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 1' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"
fi
quietly="-qq -o DPkg::Use-Pty=0 -o DPkg::Lock::Timeout=60 -o Acquire::http::Timeout=20"
export DEBIAN_FRONTEND=noninteractive
apt-get update $quietly > /dev/null 2>&1
for package in $packages; do
    echo "installing $package"
    answer=$(apt-get install $quietly --yes --no-install-recommends "$package" 2>&1) \
        || echo "its tests will be skipped: $(echo "$answer" | tail -n 1)"
done
