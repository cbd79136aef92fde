/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA device made of fibers, one a CUDA thread: what ../device.cuh and ../runtime.cuh call when the kernels are
 * compiled as C++.
 *
 * Stricter than a GPU on purpose: shared memory starts as NaN, cp.async lands at its wait and not before, a barrier
 * that part of the threads miss is an error, and so is a launch beyond the device's limits. Errors become the launch's
 * status. Functions that the sanitizers must see inside (they touch the kernels' memory) are inline here; the scheduler
 * in emulator.cpp is hidden from ThreadSanitizer, so that only barriers order what two CUDA threads do.
 */
#ifndef WKV6_EMULATOR_H
#define WKV6_EMULATOR_H

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

constexpr unsigned warp_size = 32;

/* Where in the kernels a collective operation stands: two threads that wait at different sites have diverged. */
struct site {
  const char *file;
  int line;
};
#define EMULATION_SITE emulation::site site = {__builtin_FILE(), __builtin_LINE()}

/* A cp.async on its way. */
struct copy {
  void *to;
  const void *from;
  unsigned bytes;
};

/* What a CUDA thread knows of itself. */
struct thread {
  static constexpr int most_copies = 512, most_groups = 8;
  unsigned index, block, threads;
  char *shared;
  std::size_t shared_bytes;
  copy copies[most_copies];
  int copy_count = 0, group_count = 0;
  int group_end[most_groups];
};

thread &self();
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

void block_barrier(site site);
/* Waits until every lane of the warp is at `site`. `orders_memory`: also a __syncwarp, not only an exchange of
 * registers. */
void warp_barrier(bool orders_memory, site site);

/* What each lane hands the others in one exchange; the slots are the emulator's and no sanitizer sees them. */
struct slot {
  alignas(16) unsigned char bytes[32];
};
void publish(const slot &mine);
slot receive(unsigned lane);
void end_exchange();

/* Counters of the kernel that runs. */
void count_global(std::size_t read, std::size_t written);
void count_mma();
void count_shared(const void *address, unsigned bytes); /* a NULL address: this lane takes no part */

/* Every lane gives a value and takes that of lane `from`. */
template <typename T> T exchange(T value, unsigned from, site site) {
  static_assert(sizeof(T) <= sizeof(slot));
  slot mine = {}, theirs;
  std::memcpy(mine.bytes, &value, sizeof(T));
  publish(mine);
  warp_barrier(false, site);
  theirs = receive(from % warp_size);
  std::memcpy(&value, theirs.bytes, sizeof(T));
  end_exchange();
  return value;
}

/* ldmatrix.x4: 8 x 8 matrices of 16-bit numbers, the address of row r of matrix m given by lane 8 m + r. Lane l
 * receives, of each matrix, the two numbers from column 2 (l % 4) on of row l / 4; transposed, those of the transposed
 * matrix. */
inline void load_matrices(std::uint32_t (&to)[4], const void *row, bool transposed, site site) {
  if (reinterpret_cast<std::uintptr_t>(row) % 16) fail("ldmatrix: a row is not aligned to 16 bytes");
  slot mine = {};
  std::memcpy(mine.bytes, &row, sizeof row);
  publish(mine);
  warp_barrier(false, site);
  const std::uint16_t *rows[warp_size];
  for (unsigned lane = 0; lane < warp_size; lane++) {
    const slot theirs = receive(lane);
    std::memcpy(&rows[lane], theirs.bytes, sizeof row);
  }
  end_exchange();
  const unsigned lane = self().index % warp_size, i = lane / 4, j = lane % 4 * 2;
  for (unsigned m = 0; m < 4; m++) {
    const std::uint16_t *const *matrix = rows + 8 * m;
    const std::uint32_t low = transposed ? matrix[j][i] : matrix[i][j];
    to[m] = low | static_cast<std::uint32_t>(transposed ? matrix[j + 1][i] : matrix[i][j + 1]) << 16;
  }
}

/* What the warp's lanes hold of the operands of a product: a, then b. */
struct operands {
  std::uint32_t of[warp_size][6];
};
inline operands exchange_operands(const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], site site) {
  slot mine = {};
  std::memcpy(mine.bytes, a, sizeof a);
  std::memcpy(mine.bytes + sizeof a, b, sizeof b);
  publish(mine);
  warp_barrier(false, site);
  operands all;
  for (unsigned lane = 0; lane < warp_size; lane++) {
    const slot theirs = receive(lane);
    std::memcpy(all.of[lane], theirs.bytes, sizeof all.of[lane]);
  }
  end_exchange();
  count_mma();
  return all;
}

inline float float_of_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

/* mma.m16n8k16, d += A B of bfloat16 with sums in float. Fragments as the PTX ISA has them, g = lane / 4, p = lane % 4:
 * a[0..3] hold A at rows g, g + 8, g, g + 8 and columns 2p, 2p, 2p + 8, 2p + 8 (and the next column in the upper half),
 * b[0..1] hold B at column g and rows 2p, 2p + 8 (and the next row), d[0..3] rows g, g, g + 8, g + 8, columns 2p, 2p
 * + 1. */
inline void multiply_matrices(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], site site) {
  const auto number = [](std::uint32_t word, unsigned upper) {
    return float_of_bits(upper ? word & 0xffff0000 : word << 16);
  };
  const operands all = exchange_operands(a, b, site);
  const unsigned lane = self().index % warp_size;
  for (unsigned i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 16; k++) {
      const unsigned pair = k % 8 / 2;
      const std::uint32_t of_a = all.of[row % 8 * 4 + pair][(row < 8 ? 0 : 1) + (k < 8 ? 0 : 2)];
      const std::uint32_t of_b = all.of[column * 4 + pair][4 + (k < 8 ? 0 : 1)];
      sum += static_cast<double>(number(of_a, k % 2)) * number(of_b, k % 2);
    }
    d[i] += static_cast<float>(sum);
  }
}

/* mma.m16n8k8, d += A B of tf32. a[0..3] hold A at rows g, g + 8, g, g + 8 and columns p, p, p + 4, p + 4, b[0..1] hold
 * B at column g and rows p, p + 4; d as above. The lower 13 bits of an operand are ignored. */
inline void multiply_matrices_tf32(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], site site) {
  const operands all = exchange_operands(a, b, site);
  const unsigned lane = self().index % warp_size;
  for (unsigned i = 0; i < 4; i++) {
    const unsigned row = lane / 4 + (i < 2 ? 0 : 8), column = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (unsigned k = 0; k < 8; k++) {
      const std::uint32_t of_a = all.of[row % 8 * 4 + k % 4][(row < 8 ? 0 : 1) + (k < 4 ? 0 : 2)];
      const std::uint32_t of_b = all.of[column * 4 + k % 4][4 + (k < 4 ? 0 : 1)];
      sum += static_cast<double>(float_of_bits(of_a & 0xffffe000)) * float_of_bits(of_b & 0xffffe000);
    }
    d[i] += static_cast<float>(sum);
  }
}

/* movmatrix.trans: lane 4 g + p gives row g, columns 2p, 2p + 1 of an 8 x 8 matrix of 16-bit numbers and takes those of
 * the transposed one. */
inline std::uint32_t transpose_matrix(std::uint32_t word, site site) {
  slot mine = {};
  std::memcpy(mine.bytes, &word, sizeof word);
  publish(mine);
  warp_barrier(false, site);
  const unsigned lane = self().index % warp_size, g = lane / 4, p = lane % 4;
  std::uint32_t result = 0;
  for (unsigned j = 0; j < 2; j++) {
    const slot theirs = receive((2 * p + j) * 4 + g / 2);
    std::uint32_t of_row;
    std::memcpy(&of_row, theirs.bytes, sizeof of_row);
    result |= (g % 2 ? of_row >> 16 : of_row & 0xffff) << 16 * j;
  }
  end_exchange();
  return result;
}

/* vote.any */
inline bool any_lane(bool mine_is, site site) {
  slot mine = {};
  mine.bytes[0] = mine_is;
  publish(mine);
  warp_barrier(false, site);
  bool any = false;
  for (unsigned lane = 0; lane < warp_size; lane++) any = any || receive(lane).bytes[0];
  end_exchange();
  return any;
}

/* Word by word: one access the sanitizers know about for each. */
inline void copy_words(void *to, const void *from, unsigned bytes) {
  for (unsigned i = 0; i < bytes / 4; i++)
    static_cast<std::uint32_t *>(to)[i] = from ? static_cast<const std::uint32_t *>(from)[i] : ~0u;
}

/* `read`: how many of the bytes come from global memory; the others are zeros. */
inline void copy_async(void *to, const void *from, unsigned bytes, unsigned read) {
  thread &t = self();
  char *const begin = static_cast<char *>(to);
  if (reinterpret_cast<std::uintptr_t>(to) % bytes || reinterpret_cast<std::uintptr_t>(from) % bytes)
    fail("cp.async: misaligned");
  if (begin < t.shared || begin + bytes > t.shared + t.shared_bytes) fail("cp.async: not into shared memory");
  if (t.copy_count == thread::most_copies) fail("cp.async: too many in flight");
  copy_words(to, nullptr, bytes); /* NaN until the wait */
  t.copies[t.copy_count++] = {to, from, bytes};
  count_global(read, 0);
}

inline void copy_commit() {
  thread &t = self();
  if (t.group_count == thread::most_groups) fail("cp.async: too many groups in flight");
  t.group_end[t.group_count++] = t.copy_count;
}

inline void copy_wait(int groups_left) {
  thread &t = self();
  const int done = t.group_count - groups_left;
  if (done <= 0) return;
  const int end = t.group_end[done - 1];
  for (int i = 0; i < end; i++) copy_words(t.copies[i].to, t.copies[i].from, t.copies[i].bytes);
  for (int i = end; i < t.copy_count; i++) t.copies[i - end] = t.copies[i];
  for (int g = done; g < t.group_count; g++) t.group_end[g - done] = t.group_end[g] - end;
  t.copy_count -= end;
  t.group_count = groups_left;
}

/* Runs call(argument) on every thread of every block. Returns NULL, or what went wrong. */
const char *launch(const char *name, std::uint64_t blocks, std::uint64_t threads, std::size_t shared_bytes,
                   void (*call)(const void *), const void *argument);

int multiprocessors();
std::size_t most_shared_bytes();

} // namespace emulation

extern "C" {
/* For tests. Settings: "order" (0 ascending, 1 descending, 2 random), "seed", "multiprocessors", "shared_bytes" a block
 * may have, "threads" a block may have, "count_banks". Returns the old value, -1 for an unknown name. */
std::int64_t wkv6_emulation_set(const char *name, std::int64_t value);
/* The counters "launches", "blocks", "global_read", "global_written" (bytes), "barriers" (of a block), "exchanges" (of
 * a warp), "mma", "shared_reads", "bank_conflicts" (of a warp, while "count_banks" is set) of all launches of a kernel
 * since the last reset, and the most "threads" and "shared_bytes" that a block of it had; -1 for an unknown counter. */
std::int64_t wkv6_emulation_counter(const char *kernel, const char *name);
void wkv6_emulation_reset(void);
}

#endif
