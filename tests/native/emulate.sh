#!/bin/sh
# The compiled kernel for the machine that this one is not, under qemu, held to the conformance suite. Debian; needs root
# to install a cross compiler and qemu where they are missing. AVX-512 is compiled but not run: qemu does not emulate it.
set -eu
python=$1
cd "$(dirname "$0")/../.."
out=build/other-arch
mkdir -p "$out"
case $(uname -m) in
  aarch64) compiler=x86_64-linux-gnu-g++ package=g++-x86-64-linux-gnu qemu="qemu-x86_64 -cpu max -L /usr/x86_64-linux-gnu" sets="portable avx2 avx512" ;;
  *) compiler=aarch64-linux-gnu-g++ package=g++-aarch64-linux-gnu qemu="qemu-aarch64 -L /usr/aarch64-linux-gnu" sets="portable neon" ;;
esac
if ! command -v $compiler >/dev/null || ! command -v ${qemu%% *} >/dev/null; then
  apt-get update -qq
  apt-get install -y -qq $package qemu-user >/dev/null
fi
objects=
for set in $sets; do
  case $set in
    avx2) flags="-mavx2 -mfma -mf16c" ;;
    avx512) flags="-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c" ;;
    *) flags= ;;
  esac
  upper=$(echo "$set" | tr '[:lower:]' '[:upper:]')
  $compiler -std=gnu++17 -O2 -ffp-contract=fast -Wno-psabi -Wno-aggressive-loop-optimizations $flags -DCLEARHEAD_ISA="$set" -DCLEARHEAD_"$upper" \
    -c src/clearhead/native/kernel.cpp -o "$out/$set.o"
  objects="$objects $out/$set.o"
done
$compiler -std=gnu++17 -O2 -Isrc/clearhead/native tests/native/replay.cpp src/clearhead/native/pool.cpp $objects -o "$out/replay" -lpthread
export CLEARHEAD_EMULATE="$qemu $out/replay" CLEARHEAD_TEST_NATIVE="$PWD/tests/native/emulated.py"
exec "$python" -m pytest --quiet -k "compiled and (numpy or borders)" tests/test_conformance.py tests/test_borders.py
