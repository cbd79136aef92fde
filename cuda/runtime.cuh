/* SPDX-License-Identifier: Apache-2.0
 *
 * What launch.cu uses of the CUDA runtime, and its twin on the emulated device. Errors are kept as text for
 * wkv6_cuda_error().
 */
#ifndef WKV6_RUNTIME_CUH
#define WKV6_RUNTIME_CUH

#include "device.cuh"

#include <cstdarg>
#include <cstdio>

namespace runtime {

inline thread_local char error[512] = "";

/* Where a problem runs. */
struct place {
  int multiprocessors, shared_bytes; /* that a block may have */
  void *stream;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Keeps the text, returns false. */
__attribute__((format(printf, 1, 2))) inline bool fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error, sizeof error, format, arguments);
  va_end(arguments);
  return false;
}

#if defined(WKV6_EMULATE)

/* Makes `device` the current one for as long as it lives. */
struct device_guard {
  const bool ok = true;
  explicit device_guard(int) {}
};

inline const char *const architectures = "emulated";

inline bool versions(int &runtime, int &driver) {
  runtime = driver = 0;
  return true;
}

inline bool limits(int, int &multiprocessors, int &shared_bytes) {
  multiprocessors = emulation::multiprocessors();
  shared_bytes = static_cast<int>(emulation::most_shared_bytes());
  return true;
}

template <auto kernel, int most_threads, typename arguments>
bool launch(const char *name, uint64_t blocks, int threads, int shared_bytes, void *, const arguments &a) {
  if (threads > most_threads) return fail("%s: %d threads, at most %d", name, threads, most_threads);
  const auto call = [](const void *x) { kernel(*static_cast<const arguments *>(x)); };
  const char *const why = emulation::launch(name, blocks, threads, shared_bytes, call, &a);
  return why ? fail("%s", why) : true;
}

#else

#define WKV6_TEXT_OF(...) #__VA_ARGS__
#define WKV6_TEXT(...) WKV6_TEXT_OF(__VA_ARGS__)
/* "800,900": compute capabilities 8.0 and 9.0. */
inline const char *const architectures = WKV6_TEXT(__CUDA_ARCH_LIST__);

/* 1000 * major + 10 * minor of the runtime in this library, and of the newest that the driver can serve; 0 without a
 * driver. */
inline bool versions(int &runtime, int &driver) {
  const cudaError_t status = cudaRuntimeGetVersion(&runtime);
  return (status == cudaSuccess ? cudaDriverGetVersion(&driver) : status) == cudaSuccess ||
         fail("the versions of CUDA: %s", cudaGetErrorString(status));
}

inline bool check(cudaError_t status, const char *what) {
  if (status == cudaSuccess) return true;
  cudaGetLastError(); /* else a later call of somebody else would find this error */
  int runtime = 0, driver = 0;
  if (status == cudaErrorInsufficientDriver && versions(runtime, driver)) {
    const char *const why = driver ? "too old a CUDA driver" : "no CUDA driver";
    return fail("%s: %s; needed is one for CUDA %d.%d", what, why, runtime / 1000, runtime % 1000 / 10);
  }
  if (status == cudaErrorNoKernelImageForDevice)
    return fail("%s: built for other devices than this (compute capabilities times 100: %s)", what, architectures);
  return fail("%s: %s", what, cudaGetErrorString(status));
}

/* Makes `device` the current one for as long as it lives. */
struct device_guard {
  int before = -1;
  bool ok, changed = false;
  explicit device_guard(int device) {
    ok = check(cudaGetDevice(&before), "cudaGetDevice");
    if (ok && before != device) ok = changed = check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~device_guard() {
    if (changed) cudaSetDevice(before);
  }
  device_guard(const device_guard &) = delete;
};

/* Multiprocessors of the device, and the most shared memory that one of its blocks may have. */
inline bool limits(int device, int &multiprocessors, int &shared_bytes) {
  return check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute") &&
         check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
}

/* Puts a kernel, of at most the threads of its launch bounds, on the stream. An error of an earlier call that nobody
 * asked for is not taken for this one's. */
template <auto kernel, int most_threads, typename arguments>
bool launch(const char *name, uint64_t blocks, int threads, int shared_bytes, void *stream, const arguments &a) {
  if (threads > most_threads) return fail("%s: %d threads, at most %d", name, threads, most_threads);
  if (blocks > 0x7fffffff)
    return fail("%s: %llu blocks, at most 2^31 - 1", name, static_cast<unsigned long long>(blocks));
  if (shared_bytes > 48 * 1024 &&
      !check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name))
    return false;
  void *pointers[] = {const_cast<arguments *>(&a)};
  return check(cudaLaunchKernel(reinterpret_cast<const void *>(kernel),
                                dim3(static_cast<unsigned>(blocks)),
                                dim3(threads),
                                pointers,
                                shared_bytes,
                                static_cast<cudaStream_t>(stream)),
               name);
}

#endif

} // namespace runtime

#endif
