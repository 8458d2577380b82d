#!/bin/sh
# The compiled kernel's instruction sets that this machine has not, under qemu, held to the conformance suite: those of the other
# kind of machine, and those of newer ones of its own kind. Debian; needs root to install a cross compiler and qemu where they are
# missing. AVX-512 is compiled but not run: qemu does not emulate it.
set -eu
python=$1
cd "$(dirname "$0")/../.."

flags() {
  case $1 in
    avx2) echo "-mavx2 -mfma -mf16c" ;;
    avx512) echo "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -mf16c" ;;
    avx512_bf16) echo "$(flags avx512) -mavx512bf16" ;;
    neon_fp16) echo "-march=armv8.2-a+fp16fml" ;;
    neon_bf16) echo "-march=armv8.2-a+fp16fml+bf16" ;;
  esac
}

# hold COMPILER PACKAGE QEMU SETS: builds them and runs the suite
hold() {
  compiler=$1 package=$2 qemu=$3 sets=$4
  out=build/other-arch/$compiler
  mkdir -p "$out"
  if ! command -v "$compiler" >/dev/null || ! command -v "${qemu%% *}" >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq "$package" qemu-user >/dev/null
  fi
  objects= defined=
  for set in $sets; do
    upper=$(echo "$set" | tr '[:lower:]' '[:upper:]')
    $compiler -std=gnu++17 -O2 -ffp-contract=fast -Wno-psabi -Wno-aggressive-loop-optimizations $(flags "$set") \
      -DCLEARHEAD_ISA="$set" -DCLEARHEAD_"$upper" -c src/clearhead/native/kernel.cpp -o "$out/$set.o"
    objects="$objects $out/$set.o" defined="$defined -DCLEARHEAD_HAS_$upper"
  done
  $compiler -std=gnu++17 -O2 $defined -Isrc/clearhead/native tests/native/replay.cpp src/clearhead/native/pool.cpp $objects \
    -o "$out/replay" -lpthread
  CLEARHEAD_EMULATE="$qemu $out/replay" CLEARHEAD_TEST_NATIVE="$PWD/tests/native/emulated.py" \
    "$python" -m pytest --quiet -k "compiled and (numpy or borders)" tests/test_conformance.py tests/test_borders.py
}

case $(uname -m) in
  aarch64)
    hold g++ g++ "qemu-aarch64 -cpu max" "portable neon neon_fp16 neon_bf16"
    hold x86_64-linux-gnu-g++ g++-x86-64-linux-gnu "qemu-x86_64 -cpu max -L /usr/x86_64-linux-gnu" "portable avx2 avx512 avx512_bf16"
    ;;
  *)
    hold aarch64-linux-gnu-g++ g++-aarch64-linux-gnu "qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu" "portable neon neon_fp16 neon_bf16"
    ;;
esac
