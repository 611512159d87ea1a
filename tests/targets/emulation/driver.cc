// Runs emulated kernels: reads launches from stdin, writes the tensors they leave to stdout.
//
// A launch: 9 int32 (kernel, grid x y z, block x y z, order, number of arguments), then for each
// argument its kind and, by kind, 0: int64; 1: double; 2: number of bytes (int64) and the bytes.
// Answer: int32 0 and the bytes of all tensors, or int32 1, an int32 length and a message.
//
// `order` is how threads and blocks take turns: 0 ascending, 1 descending, else random with that
// seed. Where threads only meet at barriers, all orders give the same bits.
#include "emulation.h"

#include <algorithm>
#include <cstdarg>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

namespace emulation {

constexpr size_t kStack = 128 << 10;

struct Failure {
  std::string message;
};

// Aligned to 16 bytes, with the sanitizer's red zones around it.
struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;
Memory allocate(size_t bytes) { return Memory(static_cast<char*>(std::malloc(bytes))); }

struct Copy {
  void* to;
  const void* from;  // null: `value`
  size_t bytes;
  uint32_t value;
};

struct Fiber {
  Thread thread;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  WarpOperation operation;
  std::vector<std::vector<Copy>> copies;  // groups not waited for; the last is not committed
};

Thread* current;
Index block_index, block_size, grid_size;

namespace {

std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* running;
ucontext_t scheduler;
std::string failure;  // of the fiber that ran last
std::function<void()> body;
std::map<int, Memory> shared_arrays;
std::mt19937 random_numbers;
int turn_order;
const void* scheduler_stack;
size_t scheduler_stack_size;

void switch_to_scheduler() {
  Fiber* self = running;
#if SANITIZED
  void* fake;
  __sanitizer_start_switch_fiber(&fake, scheduler_stack, scheduler_stack_size);
#endif
  swapcontext(&self->context, &scheduler);
#if SANITIZED
  __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_stack_size);
#endif
}

void switch_to(Fiber* fiber) {
  running = fiber;
  current = &fiber->thread;
#if SANITIZED
  void* fake;
  __sanitizer_start_switch_fiber(&fake, fiber->stack.get(), kStack);
#endif
  swapcontext(&scheduler, &fiber->context);
#if SANITIZED
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  if (!failure.empty()) throw Failure{failure};
}

void start() {
#if SANITIZED
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
  body();
  bool has_copies = false;
  for (const auto& group : running->copies) has_copies |= !group.empty();
  if (has_copies && failure.empty())
    failure = "a thread ends with copies or stores that it has not waited for";
  running->thread.state = State::done;
  switch_to_scheduler();
}

void wait(State state, int site) {
  current->state = state;
  current->site = site;
  switch_to_scheduler();
}

std::vector<int> turns(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (turn_order == 1) std::reverse(order.begin(), order.end());
  if (turn_order > 1) std::shuffle(order.begin(), order.end(), random_numbers);
  return order;
}

// Whether the lanes of a thread's warp have all come to the same operation; if so it is done.
bool finish_warp(int number, int num_threads) {
  int first = number / kWarp * kWarp;
  if (first + kWarp > num_threads) fail("a warp operation in a warp of %d threads", num_threads - first);
  void* operands[kWarp];
  for (int i = 0; i < kWarp; ++i) {
    Thread& lane = fibers[first + i]->thread;
    if (lane.state != State::warp) return false;
    if (lane.site != fibers[first]->thread.site)
      fail("lanes of a warp meet in different operations (lines %d and %d)", lane.site, fibers[first]->thread.site);
    operands[i] = lane.operands;
  }
  fibers[first]->operation(operands);
  for (int i = 0; i < kWarp; ++i) fibers[first + i]->thread.state = State::ready;
  return true;
}

void run_block() {
  const int count = block_size.x * block_size.y * block_size.z;
  shared_arrays.clear();
  while (static_cast<int>(fibers.size()) < count) fibers.push_back(std::make_unique<Fiber>());
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = *fibers[i];
    fiber.thread = {{i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y)},
                    i, State::ready, 0, nullptr};
    fiber.copies.assign(1, {});
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, start, 0);
  }
  while (true) {
    bool has_run = false;
    for (int i : turns(count)) {
      Fiber& fiber = *fibers[i];
      if (fiber.thread.state != State::ready) continue;
      has_run = true;
      switch_to(&fiber);
      if (fiber.thread.state == State::warp) finish_warp(i, count);
    }
    if (has_run) continue;
    int num_done = 0;
    for (int i = 0; i < count; ++i) num_done += fibers[i]->thread.state == State::done;
    if (num_done == count) return;
    const Thread& first = fibers[0]->thread;
    for (int i = 0; i < count; ++i) {
      const Thread& thread = fibers[i]->thread;
      if (thread.state == State::warp)
        fail("thread %d waits in a warp operation (line %d) for lanes that do not come", i, thread.site);
      if (thread.state != first.state || thread.site != first.site)
        fail("a barrier that not all threads come to: thread %d %s (line %d), thread 0 %s (line %d)", i,
             thread.state == State::done ? "has ended" : "waits", thread.site,
             first.state == State::done ? "has ended" : "waits", first.site);
    }
    for (int i = 0; i < count; ++i) fibers[i]->thread.state = State::ready;
  }
}

void copy(const Copy& one) { std::memcpy(one.to, one.from ? one.from : &one.value, one.bytes); }

// At once or as late as may be: what comes of it must be the same.
void now_or_later(Copy one) {
  if (turn_order == 0 || (turn_order > 1 && random_numbers() % 2)) {
    copy(one);
    one.bytes = 0;
  }
  running->copies.back().push_back(one);
}

bool read_all(void* to, size_t bytes) {
  for (size_t got = 0; got < bytes;) {
    ssize_t n = read(0, static_cast<char*>(to) + got, bytes - got);
    if (n <= 0) return false;
    got += n;
  }
  return true;
}

void write_all(const void* from, size_t bytes) {
  for (size_t put = 0; put < bytes;) {
    ssize_t n = write(1, static_cast<const char*>(from) + put, bytes - put);
    if (n <= 0) std::exit(1);
    put += n;
  }
}

}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Failure{text};
}

void barrier(int site) { wait(State::barrier, site); }

void warp(int site, WarpOperation operation, void* operands) {
  running->operation = operation;
  current->operands = operands;
  wait(State::warp, site);
}

void* shared_array(int site, size_t bytes) {
  Memory& memory = shared_arrays[site];
  if (!memory) {
    memory = allocate(bytes);
    std::memset(memory.get(), 0xff, bytes);
  }
  return memory.get();
}

void copy_later(void* to, const void* from, size_t bytes) { now_or_later({to, from, bytes, 0}); }

void store_later(void* to, uint32_t value) { now_or_later({to, nullptr, sizeof value, value}); }

void commit_copies() { running->copies.emplace_back(); }

void wait_for_copies(int pending_groups) {
  auto& groups = running->copies;
  while (static_cast<int>(groups.size()) > pending_groups + 1) {
    for (const Copy& one : groups.front()) copy(one);
    groups.erase(groups.begin());
  }
}

namespace {

// Runs a kernel: grid and block in `extents`; throws Failure.
void launch(int kernel, const int32_t* extents, int order, const Argument* arguments) {
  grid_size = {unsigned(extents[0]), unsigned(extents[1]), unsigned(extents[2])};
  block_size = {unsigned(extents[3]), unsigned(extents[4]), unsigned(extents[5])};
  turn_order = order;
  random_numbers.seed(order);
  body = [&] {
    try {
      kernels[kernel].call(arguments);
    } catch (const Failure& found) {
      failure = found.message;
    }
  };
  for (int i : turns(grid_size.x * grid_size.y * grid_size.z)) {
    block_index = {i % grid_size.x, i / grid_size.x % grid_size.y, i / (grid_size.x * grid_size.y)};
    run_block();
  }
}

bool serve_one() {
  int32_t head[9];
  if (!read_all(head, sizeof head)) return false;
  std::vector<Argument> arguments(head[8]);
  std::vector<std::pair<Memory, int64_t>> tensors;
  for (Argument& argument : arguments) {
    int32_t kind;
    if (!read_all(&kind, 4) || !read_all(&argument.integer, 8)) return false;
    if (kind != 2) continue;
    int64_t bytes = argument.integer;
    tensors.emplace_back(allocate(bytes), bytes);
    argument.pointer = tensors.back().first.get();
    if (!read_all(argument.pointer, bytes)) return false;
  }
  try {
    launch(head[0], head + 1, head[7], arguments.data());
  } catch (const Failure& found) {
    int32_t answer[2] = {1, int32_t(found.message.size())};
    write_all(answer, sizeof answer);
    write_all(found.message.data(), found.message.size());
    failure.clear();
    return true;
  }
  int32_t good = 0;
  write_all(&good, 4);
  for (const auto& [memory, bytes] : tensors) write_all(memory.get(), bytes);
  return true;
}

}  // namespace
}  // namespace emulation

// For a library in the caller's process: null, or what went wrong.
extern "C" const char* emulate(int kernel, const int32_t* extents, int order,
                               const emulation::Argument* arguments) {
  static std::string message;
  try {
    emulation::launch(kernel, extents, order, arguments);
    return nullptr;
  } catch (const emulation::Failure& found) {
    emulation::failure.clear();
    message = found.message;
    return message.c_str();
  }
}

int main() {
  while (emulation::serve_one()) {
  }
}
