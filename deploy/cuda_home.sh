#!/bin/sh
# Makes a CUDA toolkit of the packages of specserve[gpu], compiles with it, and prints its folder:
#
#   CUDA_HOME=$(deploy/cuda_home.sh) && export CUDA_HOME
#
# vLLM's libraries compile kernels. FlashInfer links them with libcudart.so and libcuda.so, and looks for
# these in lib64 and lib64/stubs. The packages have lib/libcudart.so.13. libcuda.so.1 comes with the
# driver, which is missing where an image is built. To link, the names of its functions are enough, and
# cuda.h has them.
set -eu

home=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia/cu13
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cd "$home/lib"
ln -sfn lib ../lib64
for library in lib*.so.*; do
  ln -sf "$library" "${library%%.so.*}.so"
done
mkdir -p stubs
grep -ow 'cu[A-Z][A-Za-z0-9_]*' ../include/cuda.h | sort -u | sed 's/.*/void &(void) {}/' > "$work/driver.c"
gcc -shared -fPIC -Wl,-soname,libcuda.so.1 "$work/driver.c" -o stubs/libcuda.so

# FlashInfer's flags; --no-undefined also finds functions that no library has. cuda/std/utility refuses
# an nvcc of another version than the headers'.
cat > "$work/kernel.cu" << 'EOF_CU'
#include <cuda.h>
#include <cuda/std/utility>
__global__ void kernel(int *out) { *out = cuda::std::move(1); }
extern "C" int run(int *out) { kernel<<<1, 1>>>(out); return cuInit(0); }
EOF_CU
"$home/bin/nvcc" --compiler-options=-fPIC -isystem "$home/include" -c "$work/kernel.cu" -o "$work/kernel.o"
c++ "$work/kernel.o" -shared -L"$home/lib64" -L"$home/lib64/stubs" -lcudart -lcuda -Wl,--no-undefined \
  -o "$work/kernel.so"

echo "$home"
