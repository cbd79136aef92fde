/* SPDX-License-Identifier: Apache-2.0
 *
 * The scheduler of the emulated device. A fiber runs until it must wait, then hands over to another one that can run;
 * when none can, that is a deadlock. Compile it with -DEMULATION_TSAN, _ASAN or _MSAN to go with kernels under that
 * sanitizer, but without -fsanitize=thread itself: what happens here between two CUDA threads must not count as
 * synchronisation.
 */
#include "emulator.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#if defined(EMULATION_TSAN)
#include <sanitizer/tsan_interface.h>
#elif defined(EMULATION_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif defined(EMULATION_MSAN)
#include <sanitizer/msan_interface.h>
#endif

#if defined(__x86_64__)
/* Saves the callee-saved registers on this stack, leaves its top in *save, and returns on the stack whose top is
 * `load`. */
extern "C" void wkv6_emulation_switch(void **save, void *load);
asm(R"(
.text
.hidden wkv6_emulation_switch
.globl wkv6_emulation_switch
.type wkv6_emulation_switch, @function
wkv6_emulation_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size wkv6_emulation_switch, . - wkv6_emulation_switch
)");
#define EMULATION_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

namespace emulation {
namespace {

constexpr std::size_t page = 4096, stack_bytes = 256 * 1024;

/* The stack of one fiber, with a page below it that faults. */
struct stack {
  char *base;
  stack() {
    base = static_cast<char *>(
        mmap(nullptr, page + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (base == MAP_FAILED) std::abort();
    mprotect(base, page, PROT_NONE);
  }
  stack(const stack &) = delete;
  ~stack() { munmap(base, page + stack_bytes); }
  char *bottom() { return base + page; }
};

/* A place that control can be handed to: a CUDA thread, or the caller of launch(). */
struct context {
#if EMULATION_ASSEMBLY
  void *top = nullptr;
#else
  ucontext_t registers;
#endif
  const void *stack_bottom = nullptr;
  std::size_t stack_size = 0;
  void *sanitizer = nullptr; /* ThreadSanitizer's fiber, or AddressSanitizer's fake stack */
};

enum class waits { for_nothing, for_block, for_warp, for_ever };

struct shared_read {
  std::uintptr_t address;
  unsigned bytes;
};

struct fiber : thread, context {
  waits state = waits::for_nothing;
  site at = {nullptr, 0};
  unsigned exchanges = 0;
  std::vector<shared_read> reads; /* since the warp last met */
};

/* Threads that meet: a block, or a warp. Two sets of slots and order marks alternate, so that one barrier a collective
 * is enough. */
struct meeting {
  unsigned members = 0, arrived = 0, generation = 0;
  site at = {nullptr, 0};
  char order[2];
};

struct warp : meeting {
  slot slots[2][warp_size];
};

struct block {
  std::unique_ptr<fiber[]> fibers;
  std::vector<warp> warps;
  meeting all;
  unsigned done = 0;
  std::unique_ptr<char, void (*)(void *)> shared{nullptr, std::free};
};

/* Names and values side by side; no std::map, whose code in the standard library MemorySanitizer does not know. */
constexpr const char *counter_names[] = {"launches",
                                         "blocks",
                                         "global_read",
                                         "global_written",
                                         "barriers",
                                         "exchanges",
                                         "mma",
                                         "shared_reads",
                                         "bank_conflicts",
                                         "threads",
                                         "shared_bytes"};
constexpr std::size_t counter_count = sizeof counter_names / sizeof *counter_names;
constexpr std::size_t sum_count = counter_count - 2; /* the others are the most of a launch */

struct counters {
  const char *kernel;
  std::int64_t values[counter_count];
};

struct settings {
  std::int64_t order = 0, seed = 1, multiprocessors = 4, shared_bytes = 99 * 1024, threads = 1024, count_banks = 0;
};

settings how;
std::vector<counters> counted;
std::mutex counting; /* launches on several host threads */

/* What one launch has under way. Thread-local: launches on different host threads do not meet. */
struct running {
  const char *name = nullptr;
  void (*call)(const void *) = nullptr;
  const void *argument = nullptr;
  block *current_block = nullptr;
  fiber *current = nullptr;
  context caller;
  std::vector<unsigned> ready; /* threads of the block that can run */
  std::size_t next = 0;
  std::uint64_t random = 1;
  std::int64_t read = 0, written = 0, barriers = 0, exchanges = 0, mma = 0, shared_reads = 0, conflicts = 0;
  std::string error;
};

thread_local running now;
thread_local std::vector<std::unique_ptr<stack>> stacks;
thread_local std::string last_error;

void hand_over(context &from, context &to, [[maybe_unused]] bool from_ends) {
#if defined(EMULATION_TSAN)
  __tsan_switch_to_fiber(to.sanitizer, __tsan_switch_to_fiber_no_sync);
#elif defined(EMULATION_ASAN)
  __sanitizer_start_switch_fiber(from_ends ? nullptr : &from.sanitizer, to.stack_bottom, to.stack_size);
#endif
#if EMULATION_ASSEMBLY
  wkv6_emulation_switch(&from.top, to.top);
#else
  swapcontext(&from.registers, &to.registers);
#endif
#if defined(EMULATION_ASAN)
  __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

std::uint64_t random_number() {
  now.random ^= now.random << 13;
  now.random ^= now.random >> 7;
  now.random ^= now.random << 17;
  return now.random;
}

void describe(char *text, std::size_t room, const fiber &f) {
  const char *file = f.at.file ? std::strrchr(f.at.file, '/') : nullptr;
  std::snprintf(text,
                room,
                "thread %u of block %u %s %s:%d",
                f.index,
                f.block,
                f.state == waits::for_ever ? "ended after" : "at",
                file        ? file + 1
                : f.at.file ? f.at.file
                            : "its start",
                f.at.line);
}

[[noreturn]] void deadlock() {
  const block &b = *now.current_block;
  const fiber *stuck = nullptr;
  for (unsigned t = 0; t < b.all.members && !stuck; t++)
    if (b.fibers[t].state != waits::for_ever) stuck = &b.fibers[t];
  const fiber *other = nullptr;
  for (unsigned t = 0; t < b.all.members && !other; t++)
    if (b.fibers[t].state != stuck->state || b.fibers[t].at.line != stuck->at.line) other = &b.fibers[t];
  char a[200] = "", c[200] = "no other";
  describe(a, sizeof a, *stuck);
  if (other) describe(c, sizeof c, *other);
  fail("deadlock: %s, %s", a, c);
}

/* Leaves this fiber for the next one that can run. Returns when its turn comes again. */
void give_way() {
  fiber &mine = *now.current;
  if (now.next == now.ready.size()) {
    if (now.current_block->done == now.current_block->all.members) return hand_over(mine, now.caller, true);
    deadlock();
  }
  if (how.order == 2)
    std::swap(now.ready[now.next], now.ready[now.next + random_number() % (now.ready.size() - now.next)]);
  fiber &to = now.current_block->fibers[now.ready[now.next++]];
  if (now.next == now.ready.size()) now.ready.clear(), now.next = 0;
  now.current = &to;
  if (&to != &mine) hand_over(mine, to, mine.state == waits::for_ever);
}

void run_thread() {
#if defined(EMULATION_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  now.call(now.argument);
  if (now.current->copy_count) fail("a thread ends with a cp.async in flight");
#if defined(EMULATION_TSAN)
  __tsan_release(&now); /* all a kernel does comes before what follows its launch */
#endif
  now.current->state = waits::for_ever;
  now.current_block->done++;
  give_way();
  std::abort();
}

void start(fiber &f, unsigned t) {
#if defined(EMULATION_TSAN)
  stacks[t] = std::make_unique<stack>(); /* on an old one, what the thread before did with it would look like a race */
  f.sanitizer = __tsan_create_fiber(0);
#elif defined(EMULATION_ASAN)
  __asan_unpoison_memory_region(stacks[t]->bottom(), stack_bytes);
#endif
  f.stack_bottom = stacks[t]->bottom();
  f.stack_size = stack_bytes;
#if EMULATION_ASSEMBLY
  void **top = reinterpret_cast<void **>(stacks[t]->bottom() + stack_bytes - 64);
  *--top = nullptr; /* run_thread's return address; with it the stack is aligned as a call leaves it */
  *--top = reinterpret_cast<void *>(run_thread);
  for (int saved = 0; saved < 6; saved++) *--top = nullptr;
  f.top = top;
#else
  getcontext(&f.registers);
  f.registers.uc_stack.ss_sp = stacks[t]->bottom();
  f.registers.uc_stack.ss_size = stack_bytes;
  f.registers.uc_link = nullptr;
  makecontext(&f.registers, run_thread, 0);
#endif
}

/* How many passes over the 32 banks of 4 bytes an access takes beyond the least: its lanes are served 128 bytes at a
 * time. */
std::int64_t conflicts_of(const shared_read *const reads[warp_size]) {
  const unsigned lanes_a_pass = 128 / reads[0]->bytes;
  std::int64_t extra = 0;
  for (unsigned first = 0; first < warp_size; first += lanes_a_pass) {
    std::vector<std::uintptr_t> words[32];
    std::size_t passes = 1;
    for (unsigned lane = first; lane < first + lanes_a_pass; lane++)
      for (unsigned byte = 0; reads[lane]->address && byte < reads[lane]->bytes; byte += 4) {
        const std::uintptr_t word = (reads[lane]->address + byte) / 4;
        auto &bank = words[word % 32];
        bool known = false;
        for (std::uintptr_t other : bank) known = known || other == word;
        if (!known) bank.push_back(word);
        if (bank.size() > passes) passes = bank.size();
      }
    extra += static_cast<std::int64_t>(passes) - 1;
  }
  return extra;
}

/* The n-th read of each lane since the warp last met is one instruction. */
void settle_reads(unsigned warp_index) {
  fiber *lanes = &now.current_block->fibers[warp_index * warp_size];
  for (unsigned lane = 1; lane < warp_size; lane++)
    if (lanes[lane].reads.size() != lanes[0].reads.size())
      fail("the lanes of a warp differ in their counted shared reads");
  for (std::size_t i = 0; i < lanes[0].reads.size(); i++) {
    const shared_read *reads[warp_size];
    for (unsigned lane = 0; lane < warp_size; lane++) reads[lane] = &lanes[lane].reads[i];
    now.conflicts += conflicts_of(reads);
    now.shared_reads++;
  }
  for (unsigned lane = 0; lane < warp_size; lane++) lanes[lane].reads.clear();
}

/* Arrives at a meeting of the threads [first, first + members); the last to arrive lets all go on. */
void meet(meeting &m, unsigned first, waits state, [[maybe_unused]] bool orders_memory, site at) {
  fiber &mine = *now.current;
  mine.at = at;
  if (m.arrived && (m.at.line != at.line || std::strcmp(m.at.file, at.file))) {
    mine.state = state;
    fail("divergence: other threads wait at line %d of %s", m.at.line, m.at.file);
  }
  m.at = at;
  [[maybe_unused]] char *const order = &m.order[m.generation % 2];
#if defined(EMULATION_TSAN)
  if (orders_memory) __tsan_release(order);
#endif
  if (++m.arrived < m.members) {
    mine.state = state;
    give_way();
  } else {
    m.arrived = 0;
    m.generation++;
    if (state == waits::for_warp)
      now.exchanges++;
    else
      now.barriers++;
    if (how.count_banks)
      for (unsigned w = first / warp_size; w < (first + m.members) / warp_size; w++) settle_reads(w);
    for (unsigned i = 0; i < m.members; i++) {
      fiber &other = now.current_block->fibers[first + (how.order == 1 ? m.members - 1 - i : i)];
      other.state = waits::for_nothing;
      now.ready.push_back(other.index);
    }
    give_way(); /* the last to come need not be the first to go on */
  }
#if defined(EMULATION_TSAN)
  if (orders_memory) __tsan_acquire(order);
#endif
}

std::unique_ptr<block> make_block(unsigned index, unsigned threads, std::size_t shared_bytes) {
  auto b = std::make_unique<block>();
  b->fibers.reset(new fiber[threads]); /* not make_unique, which would clear their copy queues */
  b->warps.resize(threads / warp_size);
  b->all.members = threads;
  for (warp &w : b->warps) w.members = warp_size;
  const std::size_t room = (shared_bytes + 127) / 128 * 128 + 128;
  b->shared.reset(static_cast<char *>(std::aligned_alloc(128, room)));
  std::memset(b->shared.get(), 0xff, shared_bytes); /* NaN in every floating type */
#if defined(EMULATION_MSAN)
  __msan_allocated_memory(b->shared.get(), shared_bytes);
#elif defined(EMULATION_ASAN)
  __asan_poison_memory_region(b->shared.get() + shared_bytes, room - shared_bytes);
#endif
  for (unsigned t = 0; t < threads; t++) {
    fiber &f = b->fibers[t];
    f.index = t;
    f.block = index;
    f.threads = threads;
    f.shared = b->shared.get();
    f.shared_bytes = shared_bytes;
    start(f, t);
    now.ready.push_back(how.order == 1 ? threads - 1 - t : t);
  }
  return b;
}

void run_block(block &b) {
  now.current_block = &b;
  now.next = 0;
  fiber &first = b.fibers[now.ready[now.next++]];
  now.current = &first;
  hand_over(now.caller, first, false);
  now.ready.clear();
  now.current = nullptr;
}

counters *find_counters(const char *kernel) {
  for (counters &c : counted)
    if (!std::strcmp(c.kernel, kernel)) return &c;
  return nullptr;
}

void add_counters(std::uint64_t blocks, std::uint64_t threads, std::size_t shared_bytes) {
  const std::int64_t values[counter_count] = {1,
                                              static_cast<std::int64_t>(blocks),
                                              now.read,
                                              now.written,
                                              now.barriers,
                                              now.exchanges,
                                              now.mma,
                                              now.shared_reads,
                                              now.conflicts,
                                              static_cast<std::int64_t>(threads),
                                              static_cast<std::int64_t>(shared_bytes)};
  const std::lock_guard<std::mutex> lock(counting);
  if (!find_counters(now.name)) counted.push_back({now.name, {}});
  counters &c = *find_counters(now.name);
  for (std::size_t i = 0; i < sum_count; i++) c.values[i] += values[i];
  for (std::size_t i = sum_count; i < counter_count; i++) c.values[i] = std::max(c.values[i], values[i]);
}

const char *give_error(const char *name, const std::string &why) {
  last_error = std::string(name) + ": " + why;
  return last_error.c_str();
}

} // namespace

thread &self() { return *now.current; }

void fail(const char *format, ...) {
  char text[600], where[200];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  describe(where, sizeof where, *now.current);
  now.error = std::string(text) + " (" + where + ")";
  hand_over(*now.current, now.caller, true);
  std::abort();
}

void block_barrier(site at) {
  if (now.current->group_count == 0 && now.current->copy_count)
    fail("a cp.async neither committed nor waited for at a barrier");
  meet(now.current_block->all, 0, waits::for_block, true, at);
}

void warp_barrier(bool orders_memory, site at) {
  const unsigned w = now.current->index / warp_size;
  meet(now.current_block->warps[w], w * warp_size, waits::for_warp, orders_memory, at);
}

void publish(const slot &mine) {
  fiber &f = *now.current;
  now.current_block->warps[f.index / warp_size].slots[f.exchanges % 2][f.index % warp_size] = mine;
}

slot receive(unsigned lane) {
  const fiber &f = *now.current;
  return now.current_block->warps[f.index / warp_size].slots[f.exchanges % 2][lane];
}

void end_exchange() { now.current->exchanges++; }

void count_global(std::size_t read, std::size_t written) {
  now.read += static_cast<std::int64_t>(read);
  now.written += static_cast<std::int64_t>(written);
}

void count_mma() { now.mma += now.current->index % warp_size == 0; }

void count_shared(const void *address, unsigned bytes) {
  if (how.count_banks) now.current->reads.push_back({reinterpret_cast<std::uintptr_t>(address), bytes});
}

const char *launch(const char *name, std::uint64_t blocks, std::uint64_t threads, std::size_t shared_bytes,
                   void (*call)(const void *), const void *argument) {
  if (now.current) return give_error(name, "a kernel launches a kernel");
  if (!blocks || blocks > 0x7fffffff || !threads || threads > static_cast<std::uint64_t>(how.threads) ||
      threads % warp_size)
    return give_error(name,
                      "invalid configuration: " + std::to_string(blocks) + " blocks of " + std::to_string(threads) +
                          " threads");
  if (shared_bytes > static_cast<std::size_t>(how.shared_bytes))
    return give_error(name,
                      std::to_string(shared_bytes) + " bytes of shared memory, the device has " +
                          std::to_string(how.shared_bytes));
  while (stacks.size() < threads) stacks.push_back(std::make_unique<stack>());
  now.name = name;
  now.call = call;
  now.argument = argument;
  now.error.clear();
  now.random = static_cast<std::uint64_t>(how.seed) * 0x9e3779b97f4a7c15u | 1;
  now.read = now.written = now.barriers = now.exchanges = now.mma = now.shared_reads = now.conflicts = 0;
#if defined(EMULATION_TSAN)
  now.caller.sanitizer = __tsan_get_current_fiber();
#endif
  /* Under ThreadSanitizer blocks live to the end of the launch: freeing one orders it before the next, which a GPU does
   * not. */
  std::vector<std::unique_ptr<block>> kept;
  for (std::uint64_t i = 0; i < blocks && now.error.empty(); i++) {
    kept.push_back(make_block(
        static_cast<unsigned>(how.order == 1 ? blocks - 1 - i : i), static_cast<unsigned>(threads), shared_bytes));
    run_block(*kept.back());
#if defined(EMULATION_TSAN)
    for (unsigned t = 0; t < threads; t++) __tsan_destroy_fiber(kept.back()->fibers[t].sanitizer);
#else
    kept.clear();
#endif
  }
#if defined(EMULATION_TSAN)
  __tsan_acquire(&now);
#endif
  if (!now.error.empty()) return give_error(name, now.error);
  add_counters(blocks, threads, shared_bytes);
  return nullptr;
}

int multiprocessors() { return static_cast<int>(how.multiprocessors); }
std::size_t most_shared_bytes() { return static_cast<std::size_t>(how.shared_bytes); }

} // namespace emulation

std::int64_t wkv6_emulation_set(const char *name, std::int64_t value) {
  using emulation::how;
  const struct {
    const char *name;
    std::int64_t *value;
  } all[] = {{"order", &how.order},
             {"seed", &how.seed},
             {"multiprocessors", &how.multiprocessors},
             {"shared_bytes", &how.shared_bytes},
             {"threads", &how.threads},
             {"count_banks", &how.count_banks}};
  for (const auto &one : all)
    if (!std::strcmp(one.name, name)) {
      const std::int64_t old = *one.value;
      *one.value = value;
      return old;
    }
  return -1;
}

std::int64_t wkv6_emulation_counter(const char *kernel, const char *name) {
  const std::lock_guard<std::mutex> lock(emulation::counting);
  const emulation::counters *const c = emulation::find_counters(kernel);
  for (std::size_t i = 0; i < emulation::counter_count; i++)
    if (!std::strcmp(emulation::counter_names[i], name)) return c ? c->values[i] : 0;
  return -1;
}

void wkv6_emulation_reset() { emulation::counted.clear(); }
