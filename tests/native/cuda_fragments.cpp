/* SPDX-License-Identifier: Apache-2.0
 *
 * The emulated ldmatrix and mma against plain matrices, apart from any kernel: two ways to fill the fragments of a
 * 16 x 16 by 16 x 8 product, by the tables of the PTX ISA and by ldmatrix, and both must give the product of the loops.
 */
#include "../../cuda/device.cuh"

#include <cstdio>

namespace {

struct matrices {
  uint16_t a[16][16], b[8][16]; /* A by rows, B by columns; bfloat16 */
  float by_table[16][8], by_load[16][8];
};

uint16_t &bits(uint16_t (*m)[16], int row, int column) { return m[row][column]; }

/* One warp. Shared memory: A, B by columns, and B by rows. */
void kernel(const void *argument) {
  matrices &m = **static_cast<matrices *const *>(argument);
  const int lane = static_cast<int>(thread_index()), g = lane / 4, p = lane % 4;
  uint16_t (*const a)[16] = reinterpret_cast<uint16_t (*)[16]>(shared_memory());
  uint16_t (*const b)[16] = a + 16;                                       /* [column][row] */
  uint16_t (*const b_rows)[8] = reinterpret_cast<uint16_t (*)[8]>(b + 8); /* [row][column] */
  for (int i = lane; i < 256; i += warp_size) a[i / 16][i % 16] = m.a[i / 16][i % 16];
  for (int i = lane; i < 128; i += warp_size) b[i / 16][i % 16] = b_rows[i % 16][i / 16] = m.b[i / 16][i % 16];
  block_barrier();

  /* The tables "matrix fragments for mma.m16n8k16 with floating point type" of the PTX ISA, element by element. */
  uint32_t of_a[4] = {0, 0, 0, 0}, of_b[2] = {0, 0};
  for (int i = 0; i < 8; i++) {
    const int row = i < 2 || (i >= 4 && i < 6) ? g : g + 8, column = p * 2 + (i & 1) + (i >= 4 ? 8 : 0);
    of_a[i / 2] |= static_cast<uint32_t>(bits(a, row, column)) << 16 * (i & 1);
  }
  for (int i = 0; i < 4; i++) {
    const int row = p * 2 + (i & 1) + (i >= 2 ? 8 : 0);
    of_b[i / 2] |= static_cast<uint32_t>(bits(b, g, row)) << 16 * (i & 1);
  }
  float d[4] = {1, 1, 1, 1};
  multiply_matrices(d, of_a, of_b);
  for (int i = 0; i < 4; i++) m.by_table[i < 2 ? g : g + 8][p * 2 + (i & 1)] = d[i];

  /* The usual way: rows 0-7 and 8-15 of the left half, then of the right half; B from its rows, transposed. */
  uint32_t loaded_a[4], loaded_b[4];
  load_matrices(loaded_a, &a[lane % 16][lane / 16 * 8]);
  load_matrices_transposed(loaded_b, &b_rows[lane % 16][0]);
  const uint32_t first_b[2] = {loaded_b[0], loaded_b[1]};
  float e[4] = {1, 1, 1, 1};
  multiply_matrices(e, loaded_a, first_b);
  for (int i = 0; i < 4; i++) m.by_load[i < 2 ? g : g + 8][p * 2 + (i & 1)] = e[i];
}

} // namespace

int main() {
  matrices m;
  for (int i = 0; i < 256; i++) m.a[i / 16][i % 16] = bf16_of(static_cast<float>((i * 37 + i / 16) % 101 - 50)).bits;
  for (int i = 0; i < 128; i++) m.b[i / 16][i % 16] = bf16_of(static_cast<float>((i * 53 + i / 16) % 89 - 44)).bits;
  matrices *const argument = &m;
  const char *const why = emulation::launch("fragments", 1, warp_size, 1024, kernel, &argument);
  if (why) return std::printf("FAIL %s\n", why), 1;
  int wrong = 0;
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 8; j++) {
      float want = 1;
      for (int k = 0; k < 16; k++) want += float_of(bf16{m.a[i][k]}) * float_of(bf16{m.b[j][k]});
      wrong += m.by_table[i][j] != want || m.by_load[i][j] != want;
    }
  std::printf(
      "%d of 128 elements wrong, %d products\n", wrong, static_cast<int>(wkv6_emulation_counter("fragments", "mma")));
  return wrong != 0;
}
