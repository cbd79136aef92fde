// SPDX-License-Identifier: Apache-2.0
/* How many blocks a multiprocessor holds, as the CUDA toolkit itself reckons: occupancy ARCH, where ARCH is 80, 86, 89
 * or 90; reads "registers threads shared_bytes" from standard input, writes a number for each line. Needs no GPU. */
#include <cstdio>
#include <cstdlib>

#include <cuda_occupancy.h>

namespace {

/* From the table of compute capabilities in the CUDA programming guide. */
constexpr struct {
  int arch, threads, shared_kb;
} devices[] = {{80, 2048, 164}, {86, 1536, 100}, {89, 1536, 100}, {90, 2048, 228}};

cudaOccDeviceProp device(int arch) {
  cudaOccDeviceProp d;
  for (const auto &known : devices) {
    if (known.arch != arch) continue;
    d.computeMajor = arch / 10;
    d.computeMinor = arch % 10;
    d.maxThreadsPerBlock = 1024;
    d.maxThreadsPerMultiprocessor = known.threads;
    d.regsPerBlock = d.regsPerMultiprocessor = 65536;
    d.warpSize = 32;
    d.sharedMemPerBlock = 48 << 10;
    d.reservedSharedMemPerBlock = 1 << 10;
    d.sharedMemPerMultiprocessor = static_cast<std::size_t>(known.shared_kb) << 10;
    d.sharedMemPerBlockOptin = d.sharedMemPerMultiprocessor - d.reservedSharedMemPerBlock;
    d.numSms = 1;
    return d;
  }
  std::fprintf(stderr, "occupancy: no device of architecture %d is known\n", arch);
  std::exit(2);
}

} // namespace

int main(int argc, char **argv) {
  const cudaOccDeviceProp properties = device(argc > 1 ? std::atoi(argv[1]) : 0);
  int registers, threads;
  std::size_t shared;
  while (std::scanf("%d %d %zu", &registers, &threads, &shared) == 3) {
    cudaOccFuncAttributes kernel = {};
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN; /* cudaFuncAttributeMaxDynamicSharedMemorySize was set */
    kernel.maxDynamicSharedSizeBytes = properties.sharedMemPerBlockOptin;
    kernel.numBlockBarriers = 1;
    const cudaOccDeviceState state = {};
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &properties, &kernel, &state, threads, shared)) return 1;
    std::printf("%d\n", result.activeBlocksPerMultiprocessor);
  }
  return 0;
}
