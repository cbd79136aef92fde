/* SPDX-License-Identifier: Apache-2.0
 *
 * How tensors come in: the C exchange table that a tensor type publishes as `__dlpack_c_exchange_api__` (DLPack 1.x;
 * torch >= 2.10). It fills in a view of a tensor for a fraction of what attribute access costs, and needs no header or
 * library of torch. Only the part of the ABI that is read here is declared; tests/test_abi.py compares these
 * declarations with torch's own header.
 */
#ifndef WKV6_TENSOR_VIEW_H
#define WKV6_TENSOR_VIEW_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2 };
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4 };

typedef struct {
  int32_t type, id;
} dl_device;

typedef struct {
  uint8_t code, bits;
  uint16_t lanes;
} dl_dtype;

typedef struct {
  void *data;
  dl_device device;
  int32_t ndim;
  dl_dtype dtype;
  int64_t *shape, *strides; /* strides in elements */
  uint64_t byte_offset;
} dl_tensor;

typedef struct dl_header {
  uint32_t major, minor;
  struct dl_header *previous; /* the table of an older major version, or NULL */
} dl_header;

/* A tensor with its owner. */
typedef struct dl_managed {
  struct {
    uint32_t major, minor;
  } version;
  void *owner;
  void (*deleter)(struct dl_managed *self);
  uint64_t flags;
  dl_tensor tensor;
} dl_managed;

typedef void dl_set_error(void *context, const char *kind, const char *message);

/* The functions return 0, or -1 with a Python exception set; `allocate` calls set_error instead. */
typedef struct {
  dl_header header;
  int (*allocate)(dl_tensor *prototype, dl_managed **out, void *context, dl_set_error *set_error);
  void (*from_object)(void), (*to_object)(void); /* not used here: their types do not matter */
  int (*view)(void *object, dl_tensor *view);
  int (*current_stream)(int32_t device_type, int32_t device_id, void **stream);
} dl_exchange;

#endif
