// The instructions of src/cuda/hopper.cuh on emulated threads: asynchronous copies, and products of a warpgroup
// (wgmma).
//
// Neither is done when it is asked for. A copy makes its target NaN at once and writes it when its barrier is waited
// for; a product makes its sums NaN and gives them when it is waited for. So code that reads too early gets NaN, and
// the emulation ends the process where an operand of a product changes while it runs, where a fence or a barrier is
// missing, and where a descriptor asks for what is not emulated. Operands are read as the PTX ISA defines the
// descriptor.
#pragma once
#include <map>

namespace emulation {

[[noreturn]] inline void stop(const char* why) {
  std::fprintf(stderr, "cuda emulation: %s (thread %d of block %u)\n", why, current, block_index);
  std::abort();
}

struct Copy {
  uint32_t to;
  const void* from;
  uint32_t bytes;
};

struct Barrier {
  uint32_t phase;
  Copy copy;  // its end is the end of the phase
};

constexpr int COLUMNS = 128, SUMS = COLUMNS / 2;

// B of one product: for each column, 16 values of k.
struct OperandB {
  uint16_t columns[COLUMNS][16];
};

struct Multiply {
  const uint32_t* a;
  uint32_t a_then[4];
  float* sums;
  float results[SUMS];
  uint64_t b;
  std::shared_ptr<const OperandB> b_then;
};

// Products that a thread takes part in and has not waited for: the last group is not committed yet.
struct Running {
  std::vector<std::vector<Multiply>> groups{1};
  bool fenced = false;
};

inline std::map<uint32_t, Barrier> barriers;  // by address
inline std::vector<Running> running;          // by thread

inline void begin_block(int threads) {
  barriers.clear();
  running.assign(threads, Running{});
  std::memset(shared, 0xff, shared_bytes);
}

inline uint8_t* at_shared(uint32_t at, uint32_t bytes) {
  if (at % 16 || at + bytes > shared_bytes) stop("an access outside shared memory, or unaligned");
  return shared + at;
}

// 16 bytes of column `column`: values of k 0..7 for part 0, 8..15 for part 1. CUTLASS writes the same layouts as
// ((8,n),2):((8,SBO),1) with a swizzle of 128 bytes and ((8,n),2):((1,SBO),LBO) without, in units of 16 bytes.
inline const uint8_t* described(uint64_t descriptor, int column, int part) {
  constexpr uint64_t used = 0x3fffull | 0x3fffull << 16 | 0x3fffull << 32 | 7ull << 49 | 3ull << 62;
  if (descriptor & ~used) stop("a descriptor has bits that mean nothing");
  if (descriptor >> 49 & 7) stop("a descriptor has a base offset, which is not emulated");
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
  constexpr uint32_t pitch[4] = {16, 128, 64, 32}, pattern[4] = {0, 7, 3, 1};
  if (start >> 7 & pattern[mode]) stop("a descriptor does not start where its swizzle repeats");
  const uint32_t at = start + column / 8 * stride + column % 8 * pitch[mode] + part * (mode == 0 ? leading : 16);
  return at_shared(at ^ ((at >> 7 & pattern[mode]) << 4), 16);
}

inline std::shared_ptr<const OperandB> read_b(uint64_t descriptor) {
  auto b = std::make_shared<OperandB>();
  for (int i = 0; i < COLUMNS; ++i)
    for (int part = 0; part < 2; ++part) std::memcpy(&b->columns[i][8 * part], described(descriptor, i, part), 16);
  return b;
}

// The last product that has not been waited for and adds to these sums, or null.
inline const Multiply* last_on(const float* sums) {
  const Multiply* found = nullptr;
  for (const auto& group : running[current].groups)
    for (const Multiply& product : group)
      if (product.sums == sums) found = &product;
  return found;
}

inline void complete(const std::vector<Multiply>& group) {
  for (const Multiply& product : group) {
    if (std::memcmp(product.a, product.a_then, 16) != 0) stop("a register of a running wgmma was written");
    if (current % 128 == 0 && std::memcmp(&*read_b(product.b), &*product.b_then, sizeof(OperandB)) != 0)
      stop("shared memory of a running wgmma was written");
    if (last_on(product.sums) == &product) std::memcpy(product.sums, product.results, sizeof product.results);
  }
}

}  // namespace emulation

static inline u8* launch_shared() { return emulation::shared; }

static inline u32 shared_address(const void* p) {
  return static_cast<u32>(static_cast<const u8*>(p) - emulation::shared);
}

static inline void make_barriers(u32 at, int count) {
  for (int i = 0; i < count; ++i) {
    emulation::at_shared((at + 8 * i) & ~15u, 16);
    emulation::barriers[at + 8 * i] = {};
  }
}

static inline void copy_async(u32 to, const void* from, u32 bytes, u32 barrier) {
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulation::stop("an unaligned copy");
  std::memset(emulation::at_shared(to, bytes), 0xff, bytes);
  emulation::Barrier& phases = emulation::barriers.at(barrier);
  if (phases.copy.bytes != 0) emulation::stop("a copy with the barrier of one that has not been waited for");
  phases.copy = {to, from, bytes};
}

static inline void wait_barrier(u32 at, u32 odd) {
  emulation::Barrier& barrier = emulation::barriers.at(at);
  for (int turns = 0; (barrier.phase & 1) == odd; ++turns) {
    if (turns > 1000) emulation::stop("a barrier that nothing arrives at");
    if (barrier.copy.bytes == 0) {
      emulation::wait(emulation::Wait::none);  // others go on
      continue;
    }
    std::memcpy(emulation::shared + barrier.copy.to, barrier.copy.from, barrier.copy.bytes);
    barrier = {barrier.phase + 1, {}};
  }
}

static inline void wgmma_fence() { emulation::running[emulation::current].fenced = true; }

static inline void wgmma_commit() {
  emulation::Running& mine = emulation::running[emulation::current];
  mine.groups.emplace_back();
  mine.fenced = false;
}

template <int PENDING>
void wgmma_wait() {
  auto& groups = emulation::running[emulation::current].groups;
  for (; groups.size() > PENDING + 1; groups.erase(groups.begin())) emulation::complete(groups.front());
}

template <int COUNT>
void keep_behind(float (&)[COUNT]) {}

static inline void wgmma_m64n128k16(float (&d)[64], const u32 (&a)[4], u64 b) {
  using namespace emulation;
  struct Fragment {
    u32 a[4];
    u64 b;
  };
  static Fragment fragments[8][128];
  static std::shared_ptr<const OperandB> operands[8];
  static int arrived[8];
  const int group = current / 128, lane = current % 32, g = lane / 4, t = lane % 4;
  if (!running[current].fenced) stop("a wgmma without a fence");
  if (arrived[group]++ == 0) operands[group] = read_b(b);  // at once: what none has waited for is not there
  fragments[group][current % 128] = {{a[0], a[1], a[2], a[3]}, b};
  wait(Wait::warpgroup);
  arrived[group] = 0;
  if (fragments[group][0].b != b) stop("the threads of a warpgroup describe different operands");
  const Fragment* warp = fragments[group] + current % 128 / 32 * 32;
  Multiply product{a, {a[0], a[1], a[2], a[3]}, d, {}, b, operands[group]};
  double rows[2][16];
  for (int r = 0; r < 2; ++r)
    for (int k = 0; k < 16; ++k) {
      const u32 pair = warp[g * 4 + k % 8 / 2].a[r + 2 * (k >= 8)];
      rows[r][k] = k & 1 ? high_half(pair) : low_half(pair);
    }
  const Multiply* before = last_on(d);
  for (int i = 0; i < SUMS; ++i) {
    const uint16_t* column = product.b_then->columns[8 * (i / 4) + 2 * t + i % 2];
    double sum = before == nullptr ? d[i] : before->results[i];
    for (int k = 0; k < 16; ++k) sum += rows[i / 2 % 2][k] * float_of(static_cast<u32>(column[k]) << 16);
    product.results[i] = static_cast<float>(sum);
  }
  wait(Wait::warpgroup);
  running[current].groups.back().push_back(product);
  std::memset(d, 0xff, sizeof d);
}
