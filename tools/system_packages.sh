#!/bin/sh
# Installs what Debian must provide for the tests, where that is allowed; says loudly what is missing where it is not.
missing=""
command -v clang >/dev/null 2>&1 || missing="$missing clang"
ldconfig -p 2>/dev/null | grep -q 'libusb-1\.0\.so\.0' || missing="$missing libusb-1.0-0"
ls /usr/lib/*/libumockdev-preload.so* >/dev/null 2>&1 || missing="$missing umockdev"
command -v chromium >/dev/null 2>&1 || missing="$missing chromium"
[ -n "$missing" ] || exit 0
root=""
[ "$(id -u)" = 0 ] || { command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null && root="sudo -n"; } || root="none"
if [ "$root" != none ] && command -v apt-get >/dev/null 2>&1; then
  echo "installing$missing with apt-get"
  { $root apt-get update -qq && $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing; } >/dev/null 2>&1 && exit 0
fi
echo "=====================================================================================" >&2
echo "NOT INSTALLED:$missing (no root or no apt-get). The tests that need them are SKIPPED." >&2
echo "On Debian or Ubuntu: sudo apt-get install$missing" >&2
echo "=====================================================================================" >&2
exit 0
