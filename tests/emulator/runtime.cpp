// Runs the grid of a kernel that g++ compiled: blocks one after another, the threads of a block as fibers that switch
// where they wait for each other. Kernels are compiled with -fsanitize=thread, which makes every load and store call a
// function here (there is no libtsan behind it). Each is checked before it happens:
//
//   global memory  inside one of the arrays of the launch; results written by one thread only
//   shared memory  inside the block's share, written before it is read, not while an asynchronous copy is on its way,
//                  and ordered by a barrier, or by a chain of them, whenever two threads touch the same bytes and
//                  one of them writes
//   barriers       of all threads of a block: at one place of the code, as compute-sanitizer's synccheck wants
//
// Floats below the normal range are 0, as CuPy compiles kernels with -ftz=true (on x86, of kernels without float64).
//
// A finding ends the launch with a message; it does not depend on the order in which fibers happen to run.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <memory>
#include <vector>

namespace {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kPoisonedBytes = 32 * 1024;  // of it, from a kernel's first variable on
constexpr size_t kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int kNumBarriers = 16;
constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr int kMaxMutants = 4096;
constexpr size_t kCellBytes = 2;  // the smallest piece of shared memory that two threads may own separately

struct Index {
    unsigned int x, y, z;
};

// An array of the launch, as runtime_launch is given it.
struct Range {
    uintptr_t begin;
    uintptr_t end;
    const char* name;
    int writable;
};

struct Copy {
    char* target;
    unsigned int size;
    char bytes[16];
};

enum class State { kReady, kWaitsForWarp, kWaitsForBlock, kReturned };

struct Fiber {
    State state;
    bool begun;  // its context holds a kernel in progress, or waits for the next one
    jmp_buf context;
    char* stack;
    std::vector<Copy> open_copies;  // issued, in no group yet
    std::vector<std::vector<Copy>> copy_groups;
};

// A warp's time is the number of barriers of any kind that it has taken part in, from 1. Barriers are all that orders
// memory, so what its lanes do at one time is unordered, and what they did at earlier times comes before it.
struct Warp {
    const char* waits_in;  // collective operation that the first lanes to arrive wait in
    int num_arrived;
    // A vector clock: what each warp did before this time comes before what this warp does now, directly or through
    // barriers of others. The entry of the warp itself is its time.
    uint32_t known[kMaxWarps];
    bool vote;  // outcome of its last named barrier
    const void* inputs[kWarpSize];
    void* outputs[kWarpSize];
};

// What a lane brings to a named barrier.
struct Arrival {
    int num_threads;
    bool votes, predicate;
};

struct Barrier {
    const char* name;  // of the operation that the first warp has come to
    int num_threads;
    bool votes;
    uintptr_t place;            // where the first warp to wait waits
    uint32_t warps, waiting;    // that have arrived, and those of them that wait
    uint32_t known[kMaxWarps];  // by those that do not, when they arrived
    bool vote;
    // One that waited in the last use, and the time that began for it then: who does not know of it might have come
    // before.
    int last_warp;
    uint32_t last_time;
};

// One in shared memory. What is known at the end of a phase is what its warps knew when they arrived, and before.
struct PhaseBarrier {
    size_t offset;
    int num_warps, num_left;
    bool parity;       // of the phase under way
    int bytes_due;     // in it
    uint32_t waiting;  // warps
    uint32_t known[kMaxWarps], known_at_end[kMaxWarps];
};

const struct BarrierNames {
    char wait[kNumBarriers][20], any[kNumBarriers][20], arrive[kNumBarriers][20];
    BarrierNames() {
        for (int barrier = 0; barrier < kNumBarriers; ++barrier) {
            snprintf(wait[barrier], sizeof(wait[barrier]), "barrier_wait %d", barrier);
            snprintf(any[barrier], sizeof(any[barrier]), "barrier_any %d", barrier);
            snprintf(arrive[barrier], sizeof(arrive[barrier]), "barrier_arrive %d", barrier);
        }
    }
} barrier_names;

// Who wrote a piece of shared memory last, and at what time of its warp; who has read it since.
struct Cell {
    uint32_t write_time;  // 0: never written
    uint32_t reading_warps;
    uint16_t writer;
    bool copy_pending;
};

// When a warp read a cell last; earlier reads come before that.
struct Read {
    uint32_t time;
    uint32_t lane;
};
constexpr uint32_t kSeveralLanes = kWarpSize;

struct Launch {
    void (*kernel)(const void*);
    const void* params;
    std::vector<Range> ranges;
    std::vector<std::unique_ptr<uint32_t[]>> writers;  // per byte of a writable range: 1 + thread of the grid
    size_t shared_bytes;
    unsigned int num_threads;
    uint64_t random;  // state of the generator; 0: natural order of warps and lanes
};

Fiber fibers[kMaxThreads];
Warp warps[kMaxWarps];
Barrier barriers[kNumBarriers];
std::vector<PhaseBarrier> phase_barriers;
Cell cells[kMaxSharedBytes / kCellBytes];
Read reads[kMaxWarps][kMaxSharedBytes / kCellBytes];  // valid for a cell's reading_warps
Launch* launch;
jmp_buf scheduler;
int current;  // thread that runs
unsigned int num_at_barrier;
uintptr_t block_waits_at;  // where the first thread to come to __syncthreads waits
unsigned int num_returned;
bool failed;
bool unchecked;  // the runtime itself is at work in a kernel's code
char message[2048];
uintptr_t failing_pc;
uintptr_t stack_begin;  // of the fiber that runs
size_t last_range;
int mutant = -1;  // that runs
uint64_t num_steps, max_steps = ~0ull;

}  // namespace

extern "C" {
Index threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) char shared_memory[kMaxSharedBytes];
extern const int runtime_max_mutants = kMaxMutants;
unsigned char runtime_reached[kMaxMutants];  // 1: a kernel has come by, 2: where the mutant is not what the source is
}

namespace {

[[noreturn]] void fail(uintptr_t pc, const char* format, ...) {
    const int used =
        snprintf(message, sizeof(message), "block %u, thread %u: ", blockIdx.x, static_cast<unsigned int>(current));
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + used, sizeof(message) - used, format, arguments);
    va_end(arguments);
    failing_pc = pc;
    failed = true;
    _longjmp(scheduler, 1);
}

unsigned int random_below(unsigned int bound) {
    launch->random ^= launch->random << 13;
    launch->random ^= launch->random >> 7;
    launch->random ^= launch->random << 17;
    return static_cast<unsigned int>((launch->random >> 32) % bound);
}

// Whether arithmetic takes what is below the normal range for 0, while this lives.
class Flushing {
    static unsigned int set(bool flushes) {
#ifdef __SSE__
        constexpr unsigned int kFlush = 0x8040;  // results, and operands
        const unsigned int before = _mm_getcsr();
        _mm_setcsr(flushes ? before | kFlush : before & ~kFlush);
        return before & kFlush;
#else
        return 0;
#endif
    }
    unsigned int before;

  public:
    explicit Flushing(bool flushes) : before(set(flushes)) {}
    ~Flushing() { set(before != 0); }
};

// The value, of which the compiler knows nothing: it is used behind what has been done, and computed in front of it.
float here(float value) {
    asm volatile("" : "+m"(value)::"memory");
    return value;
}

// ------------------------------------------------------------------------------------------------ fibers

// Leaves NaN where the variables of the next function will be: those without a value hold it, whatever ran before.
__attribute__((noinline)) void poison_stack() {
    char area[kPoisonedBytes];
    memset(area, 0xff, sizeof(area));
    asm volatile("" : : "r"(area) : "memory");
}

void run_kernels() {
    for (;;) {
        const int thread = current;
        poison_stack();
        launch->kernel(launch->params);
        Fiber& fiber = fibers[thread];
        if (!fiber.open_copies.empty()) fail(0, "returned with asynchronous copies that were not waited for");
        for (const auto& group : fiber.copy_groups) {
            if (!group.empty()) fail(0, "returned with asynchronous copies that were not waited for");
        }
        fiber.state = State::kReturned;
        ++num_returned;
        if (_setjmp(fiber.context) == 0) _longjmp(scheduler, 1);
    }
}

void wait_as(State state) {
    Fiber& fiber = fibers[current];
    fiber.state = state;
    if (_setjmp(fiber.context) == 0) _longjmp(scheduler, 1);
}

void resume(int thread) {
    Fiber& fiber = fibers[thread];
    current = thread;
    threadIdx.x = thread;
    stack_begin = reinterpret_cast<uintptr_t>(fiber.stack);
    if (_setjmp(scheduler) != 0) return;
    if (fiber.begun) _longjmp(fiber.context, 1);
    fiber.begun = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, run_kernels, 0);
    setcontext(&context);
}

bool make_stacks(unsigned int num_threads) {
    for (unsigned int thread = 0; thread < num_threads; ++thread) {
        if (fibers[thread].stack) continue;
        void* memory =
            mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return false;
        mprotect(memory, 4096, PROT_NONE);
        fibers[thread].stack = static_cast<char*>(memory);
    }
    return true;
}

const char* name_of(State state, int warp) {
    switch (state) {
        case State::kWaitsForWarp: return warps[warp].waits_in;
        case State::kWaitsForBlock: return "__syncthreads";
        case State::kReturned: return "the end of the kernel";
        default: return "the middle of it";
    }
}

// Nobody can go on: says who waits where.
void report_deadlock() {
    int used = snprintf(message, sizeof(message), "block %u: the threads wait for each other for ever:", blockIdx.x);
    State previous = State::kReady;
    int shown = 0;
    for (unsigned int thread = 0; thread < launch->num_threads && shown < 12; ++thread) {
        const State state = fibers[thread].state;
        if (thread % kWarpSize != 0 && state == previous) continue;
        previous = state;
        ++shown;
        used += snprintf(message + used, sizeof(message) - used, " from thread %u in %s;", thread,
                         name_of(state, thread / kWarpSize));
    }
    failing_pc = 0;
    failed = true;
}

// One round over a warp's lanes; false if none could run.
bool run_warp(int warp) {
    const unsigned int first = launch->random ? random_below(kWarpSize) : 0;
    const unsigned int step = launch->random ? 2 * random_below(kWarpSize / 2) + 1 : 1;
    bool ran = false;
    for (int i = 0; i < kWarpSize && !failed; ++i) {
        const int thread = warp * kWarpSize + (first + i * step) % kWarpSize;
        if (fibers[thread].state != State::kReady) continue;
        resume(thread);
        ran = true;
    }
    return ran;
}

void run_block() {
    const unsigned int num_warps = launch->num_threads / kWarpSize;
    for (unsigned int thread = 0; thread < launch->num_threads; ++thread) {
        fibers[thread].state = State::kReady;
        fibers[thread].open_copies.clear();
        fibers[thread].copy_groups.clear();
    }
    memset(warps, 0, num_warps * sizeof(Warp));
    for (unsigned int warp = 0; warp < num_warps; ++warp) warps[warp].known[warp] = 1;
    memset(barriers, 0, sizeof(barriers));
    phase_barriers.clear();
    memset(cells, 0, (launch->shared_bytes + kCellBytes - 1) / kCellBytes * sizeof(Cell));
    memset(shared_memory, 0xff, launch->shared_bytes);
    num_at_barrier = num_returned = 0;
    while (!failed && num_returned < launch->num_threads) {
        // A warp runs as far as it can before the next one's turn, or for one round only: both orders find mistakes.
        bool ran = false;
        const unsigned int first = launch->random ? random_below(num_warps) : 0;
        for (unsigned int i = 0; i < num_warps && !failed; ++i) {
            const int warp = static_cast<int>((first + i) % num_warps);
            while (!failed && run_warp(warp)) {
                ran = true;
                if (launch->random && random_below(4) == 0) break;
            }
        }
        if (!ran && !failed) report_deadlock();
    }
}

// ------------------------------------------------------------------------------------------- memory checks

// Whether what a lane did at a time of its warp comes before what this thread does. No thread is kSeveralLanes.
bool ordered(int warp, uint32_t lane, uint32_t time) {
    const int here = current / kWarpSize;
    return time < warps[here].known[warp] || (warp == here && lane == static_cast<uint32_t>(current % kWarpSize));
}

void check_cell_read(size_t index, size_t offset, uintptr_t pc) {
    Cell& cell = cells[index];
    const int warp = current / kWarpSize;
    const uint32_t lane = current % kWarpSize, now = warps[warp].known[warp];
    Read& read = reads[warp][index];
    const bool again = (cell.reading_warps >> warp & 1) != 0 && read.time == now;
    // Where two lanes were right to read, so are all: at most one of them is the writer.
    if (again && (read.lane == lane || read.lane == kSeveralLanes)) return;
    if (cell.copy_pending) fail(pc, "reads shared byte %zu before the wait for its asynchronous copy", offset);
    if (cell.write_time == 0) fail(pc, "reads shared byte %zu, which nobody has written", offset);
    if (!ordered(cell.writer / kWarpSize, cell.writer % kWarpSize, cell.write_time))
        fail(pc, "reads shared byte %zu, which thread %d wrote, with no barrier between", offset, cell.writer);
    read = {now, again ? kSeveralLanes : lane};
    cell.reading_warps |= 1u << warp;
}

void check_cell_write(size_t index, size_t offset, uintptr_t pc) {
    Cell& cell = cells[index];
    if (cell.copy_pending) fail(pc, "writes shared byte %zu while an asynchronous copy to it is on its way", offset);
    if (cell.write_time != 0 && !ordered(cell.writer / kWarpSize, cell.writer % kWarpSize, cell.write_time))
        fail(pc, "writes shared byte %zu, which thread %d wrote, with no barrier between", offset, cell.writer);
    for (uint32_t others = cell.reading_warps; others != 0; others &= others - 1) {
        const int reader = __builtin_ctz(others);
        const Read& read = reads[reader][index];
        if (!ordered(reader, read.lane, read.time))
            fail(pc, "writes shared byte %zu, which %s read, with no barrier between", offset,
                 reader == current / kWarpSize ? "other lanes" : "other warps");
    }
    const int warp = current / kWarpSize;
    cell.writer = static_cast<uint16_t>(current);
    cell.write_time = warps[warp].known[warp];
    cell.reading_warps = 0;  // whoever comes after this write comes after those reads
}

void check_shared(size_t offset, size_t size, bool writes, uintptr_t pc) {
    if (offset + size > launch->shared_bytes)
        fail(pc, "%s %zu bytes at shared byte %zu of %zu", writes ? "writes" : "reads", size, offset,
             launch->shared_bytes);
    for (size_t cell = offset / kCellBytes; cell * kCellBytes < offset + size; ++cell) {
        if (writes) check_cell_write(cell, offset, pc);
        else check_cell_read(cell, offset, pc);
    }
}

[[noreturn]] void fail_outside(uintptr_t address, size_t size, bool writes, uintptr_t pc) {
    const Range* nearest = nullptr;
    uint64_t least = ~0ull;
    for (const Range& range : launch->ranges) {
        const uint64_t distance = address >= range.end    ? address - range.end
                                  : address < range.begin ? range.begin - address
                                                          : 0;
        if (distance >= least) continue;
        least = distance;
        nearest = &range;
    }
    const char* verb = writes ? "writes" : "reads";
    if (!nearest || least > 1 << 20) fail(pc, "%s %zu bytes at %p, far from every array", verb, size, (void*)address);
    fail(pc, "%s %zu bytes at byte %lld of %s, which has %lld", verb, size,
         static_cast<long long>(address) - static_cast<long long>(nearest->begin), nearest->name,
         static_cast<long long>(nearest->end - nearest->begin));
}

void check_global(uintptr_t address, size_t size, bool writes, uintptr_t pc) {
    const std::vector<Range>& ranges = launch->ranges;
    size_t i = last_range;
    if (i >= ranges.size() || address < ranges[i].begin || address + size > ranges[i].end) {
        for (i = 0; i < ranges.size(); ++i)
            if (address >= ranges[i].begin && address + size <= ranges[i].end) break;
        if (i == ranges.size()) fail_outside(address, size, writes, pc);
        last_range = i;
    }
    if (!writes) return;
    if (!ranges[i].writable) fail(pc, "writes to %s, an input", ranges[i].name);
    const uint32_t me = 1 + blockIdx.x * launch->num_threads + current;
    for (size_t byte = address - ranges[i].begin; byte < address - ranges[i].begin + size; ++byte) {
        uint32_t& writer = launch->writers[i][byte];
        if (writer != 0 && writer != me)
            fail(pc, "writes byte %zu of %s, which thread %u of block %u has written", byte, ranges[i].name,
                 (writer - 1) % launch->num_threads, (writer - 1) / launch->num_threads);
        writer = me;
    }
}

inline void take_step(void* pc) {
    if (++num_steps > max_steps) fail(reinterpret_cast<uintptr_t>(pc), "takes far more steps than without the mutant");
}

inline void check(const volatile void* pointer, size_t size, bool writes, void* pc) {
    take_step(pc);
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
    if (address - stack_begin < kStackBytes || unchecked) return;
    const uintptr_t offset = address - reinterpret_cast<uintptr_t>(shared_memory);
    if (offset < kMaxSharedBytes) check_shared(offset, size, writes, reinterpret_cast<uintptr_t>(pc));
    else check_global(address, size, writes, reinterpret_cast<uintptr_t>(pc));
}

void finish_copies(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
        const size_t offset = copy.target - shared_memory;
        for (size_t byte = offset; byte < offset + copy.size; byte += kCellBytes)
            cells[byte / kCellBytes].copy_pending = false;
        check_shared(offset, copy.size, true, 0);
        memcpy(copy.target, copy.bytes, copy.size);
    }
}

// --------------------------------------------------------------------------------------------- barriers

uint32_t mask_of_block() { return ~0u >> (kMaxWarps - launch->num_threads / kWarpSize); }

void learn(uint32_t (&known)[kMaxWarps], const uint32_t (&more)[kMaxWarps]) {
    for (int warp = 0; warp < kMaxWarps; ++warp) known[warp] = std::max(known[warp], more[warp]);
}

void let_go_on(int warp) {
    for (int lane = 0; lane < kWarpSize; ++lane) fibers[warp * kWarpSize + lane].state = State::kReady;
}

// Lets the threads of these warps go on, ordered after all that any of them did before, and what is `known` to others.
void pass_barrier(uint32_t mask, uint32_t (&known)[kMaxWarps]) {
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        Warp& warp = warps[__builtin_ctz(rest)];
        ++warp.known[__builtin_ctz(rest)];
        learn(known, warp.known);
    }
    for (; mask != 0; mask &= mask - 1) {
        memcpy(warps[__builtin_ctz(mask)].known, known, sizeof(known));
        let_go_on(__builtin_ctz(mask));
    }
}

// Whether all lanes of the warp have come to the operation, with this one.
bool arrive_with_warp(const char* name, const void* input, void* output, uintptr_t pc) {
    Warp& warp = warps[current / kWarpSize];
    if (warp.num_arrived == 0) warp.waits_in = name;
    else if (strcmp(warp.waits_in, name) != 0)
        fail(pc, "calls %s while other lanes of its warp wait in %s", name, warp.waits_in);
    warp.inputs[current % kWarpSize] = input;
    warp.outputs[current % kWarpSize] = output;
    warp.num_arrived = (warp.num_arrived + 1) % kWarpSize;
    return warp.num_arrived == 0;
}

// compute-sanitizer ends a program for it, even where a barrier's number makes it right.
constexpr char kOtherPlace[] = "calls %s at another place than other threads of the block";

// The last lane of a warp comes to a named barrier.
void arrive_with_others(Barrier& barrier, const char* name, bool waits, uintptr_t pc) {
    const Warp& warp = warps[current / kWarpSize];
    const auto arrival = [&](int lane) { return *static_cast<const Arrival*>(warp.inputs[lane]); };
    if (warp.known[barrier.last_warp] < barrier.last_time)
        fail(pc, "calls %s, which other warps have used, with no barrier between", name);
    if (barrier.warps == 0) {
        barrier.name = name;
        barrier.num_threads = arrival(0).num_threads;
        barrier.votes = arrival(0).votes;
        barrier.vote = false;
        memset(barrier.known, 0, sizeof(barrier.known));
    }
    if (arrival(0).votes != barrier.votes) fail(pc, "calls %s while other warps wait in %s", name, barrier.name);
    for (int lane = 0; lane < kWarpSize; ++lane) {
        if (arrival(lane).num_threads != barrier.num_threads)
            fail(pc, "calls %s for %d threads while others wait in it for %d", name, arrival(lane).num_threads,
                 barrier.num_threads);
        barrier.vote |= arrival(lane).predicate;
    }
    const uint32_t mask = 1u << current / kWarpSize;
    if (barrier.warps & mask) fail(pc, "calls %s twice before others have come", name);
    barrier.warps |= mask;
    if (!waits) return;
    if (barrier.waiting == 0) barrier.place = pc;
    barrier.waiting |= mask;
    if (barrier.num_threads == static_cast<int>(launch->num_threads) && pc != barrier.place)
        fail(pc, kOtherPlace, name);
}

// Lets those go on that wait in a named barrier, if all have come.
void pass_if_complete(Barrier& barrier) {
    if (__builtin_popcount(barrier.warps) * kWarpSize != barrier.num_threads) return;
    if (barrier.waiting == 0) fail(0, "is the last to come to %s, where nobody waits", barrier.name);
    for (uint32_t mask = barrier.waiting; mask != 0; mask &= mask - 1) warps[__builtin_ctz(mask)].vote = barrier.vote;
    pass_barrier(barrier.waiting, barrier.known);
    barrier.last_warp = __builtin_ctz(barrier.waiting);
    barrier.last_time = warps[barrier.last_warp].known[barrier.last_warp];
    barrier.warps = barrier.waiting = 0;
}

void check_barrier(int barrier, const char* name, int num_threads, uintptr_t pc) {
    const bool is_block = num_threads == static_cast<int>(launch->num_threads);
    if (barrier < (is_block ? 0 : 1) || barrier >= kNumBarriers)
        fail(pc, "comes to barrier %d, but they are 1 to %d", barrier, kNumBarriers - 1);
    if (num_threads < kWarpSize || num_threads % kWarpSize != 0 || num_threads > static_cast<int>(launch->num_threads))
        fail(pc, "calls %s for %d threads, which are no warps of a block of %u", name, num_threads,
             launch->num_threads);
}

PhaseBarrier& phase_barrier_at(const void* address, uintptr_t pc) {
    const size_t offset = static_cast<const char*>(address) - shared_memory;
    for (PhaseBarrier& barrier : phase_barriers) {
        if (barrier.offset == offset) {
            check_shared(offset, 8, false, pc);
            return barrier;
        }
    }
    fail(pc, "shared byte %zu is no barrier that somebody has made", offset);
}

// Whether all lanes of the warp have come to it.
bool arrive_together(const char* name, const void* address, uintptr_t pc) {
    if (!arrive_with_warp(name, address, nullptr, pc)) return false;
    for (const void* other : warps[current / kWarpSize].inputs) {
        if (other != address) fail(pc, "calls %s for more than one barrier", name);
    }
    return true;
}

// Lets a warp go on behind the end of a phase.
void pass_phase(const PhaseBarrier& barrier, int warp) {
    ++warps[warp].known[warp];
    learn(warps[warp].known, barrier.known_at_end);
    let_go_on(warp);
}

}  // namespace

// ------------------------------------------------------------------------------------- what kernels call

#define CALLER __builtin_return_address(0)

extern "C" {

void cpu_cuda_fail(const char* text) { fail(reinterpret_cast<uintptr_t>(CALLER), "%s", text); }

void cpu_cuda_read(const void* address, unsigned int size) { check(address, size, false, CALLER); }
void cpu_cuda_write(void* address, unsigned int size) { check(address, size, true, CALLER); }

bool cpu_cuda_mutant(int which) {
    take_step(CALLER);
    runtime_reached[which] = 3;
    return which == mutant;
}

bool cpu_cuda_guard(int which, bool forced, bool actual) {
    take_step(CALLER);
    runtime_reached[which] |= actual == forced ? 1 : 3;
    return which == mutant ? forced : actual;
}

void cpu_cuda_sync_block() {
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    if (num_returned != 0) fail(pc, "__syncthreads after other threads have returned");
    if (num_at_barrier == 0) block_waits_at = pc;
    if (pc != block_waits_at) fail(pc, kOtherPlace, "__syncthreads");
    if (++num_at_barrier < launch->num_threads) return wait_as(State::kWaitsForBlock);
    num_at_barrier = 0;
    uint32_t known[kMaxWarps] = {};
    pass_barrier(mask_of_block(), known);
}

bool cpu_cuda_sync_some(int barrier, int num_threads, bool votes, bool predicate) {
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    const char* name = (votes ? barrier_names.any : barrier_names.wait)[barrier & (kNumBarriers - 1)];
    check_barrier(barrier, name, num_threads, pc);
    const Arrival arrival = {num_threads, votes, predicate};
    const bool all_lanes = arrive_with_warp(name, &arrival, nullptr, pc);
    fibers[current].state = State::kWaitsForWarp;
    if (all_lanes) {
        arrive_with_others(barriers[barrier], name, true, pc);
        pass_if_complete(barriers[barrier]);
    }
    if (fibers[current].state != State::kReady) wait_as(State::kWaitsForWarp);
    return warps[current / kWarpSize].vote;
}

void cpu_cuda_arrive_some(int barrier, int num_threads) {
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    const char* name = barrier_names.arrive[barrier & (kNumBarriers - 1)];
    check_barrier(barrier, name, num_threads, pc);
    const Arrival arrival = {num_threads, false, false};
    if (!arrive_with_warp(name, &arrival, nullptr, pc)) return wait_as(State::kWaitsForWarp);
    const int index = current / kWarpSize;
    arrive_with_others(barriers[barrier], name, false, pc);
    ++warps[index].known[index];
    learn(barriers[barrier].known, warps[index].known);
    pass_if_complete(barriers[barrier]);
    let_go_on(index);
}

float cpu_cuda_multiply(float a, float b) {
    const Flushing none(false);
    return here(here(a) * here(b));
}

float cpu_cuda_multiply_add(float a, float b, float c) {
    const Flushing none(false);
    return here(__builtin_fmaf(here(a), here(b), here(c)));
}

float cpu_cuda_divide(float a, float b) {
    const Flushing none(false);
    return here(here(a) / here(b));
}

void cpu_cuda_mbarrier_init(void* address, int num_warps) {
    const size_t offset = static_cast<char*>(address) - shared_memory;
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    if (offset >= kMaxSharedBytes || num_warps < 1)
        fail(pc, "a barrier for %d warps, or not in shared memory", num_warps);
    for (const PhaseBarrier& barrier : phase_barriers) {
        if (barrier.offset == offset) fail(pc, "makes the barrier at shared byte %zu twice", offset);
    }
    phase_barriers.push_back({offset, num_warps, num_warps, false, 0, 0, {}, {}});
}

void cpu_cuda_mbarrier_arrive(const void* address) {
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    PhaseBarrier& barrier = phase_barrier_at(address, pc);
    if (!arrive_together("mbarrier_arrive", address, pc)) return wait_as(State::kWaitsForWarp);
    const int index = current / kWarpSize;
    learn(barrier.known, warps[index].known);
    barrier.known[index] = ++warps[index].known[index];
    if (--barrier.num_left == 0) {
        if (barrier.bytes_due != 0) fail(pc, "a phase is to end with %d bytes expected", barrier.bytes_due);
        barrier.num_left = barrier.num_warps;
        barrier.parity = !barrier.parity;
        memcpy(barrier.known_at_end, barrier.known, sizeof(barrier.known));
        for (; barrier.waiting != 0; barrier.waiting &= barrier.waiting - 1)
            pass_phase(barrier, __builtin_ctz(barrier.waiting));
    }
    let_go_on(index);
}

void cpu_cuda_mbarrier_expect(const void* address, int num_bytes) {
    phase_barrier_at(address, reinterpret_cast<uintptr_t>(CALLER)).bytes_due += num_bytes;
}

void cpu_cuda_mbarrier_wait(const void* address, bool parity) {
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    PhaseBarrier& barrier = phase_barrier_at(address, pc);
    if (!arrive_together("mbarrier_wait", address, pc)) return wait_as(State::kWaitsForWarp);
    const int index = current / kWarpSize;
    if (barrier.parity != parity) return pass_phase(barrier, index);
    barrier.waiting |= 1u << index;
    wait_as(State::kWaitsForWarp);
}

void cpu_cuda_collective(const char* name, const void* input, void* output, bool orders_memory,
                         void (*compute)(const void* const*, void* const*)) {
    const int index = current / kWarpSize;
    Warp& warp = warps[index];
    if (!arrive_with_warp(name, input, output, reinterpret_cast<uintptr_t>(CALLER)))
        return wait_as(State::kWaitsForWarp);
    warp.known[index] += orders_memory;
    {
        const Flushing none(false);
        unchecked = true;
        compute(warp.inputs, warp.outputs);
        unchecked = false;
    }
    let_go_on(index);
}

void cpu_cuda_copy_async(void* target, const void* source, unsigned int size, bool valid) {
    const uintptr_t pc = reinterpret_cast<uintptr_t>(CALLER);
    const size_t offset = static_cast<char*>(target) - shared_memory;
    if (offset >= kMaxSharedBytes) fail(pc, "an asynchronous copy must go to shared memory");
    if (offset % size != 0 || (valid && reinterpret_cast<uintptr_t>(source) % size != 0))
        fail(pc, "an asynchronous copy of %u bytes on another boundary", size);
    if (valid) check_global(reinterpret_cast<uintptr_t>(source), size, false, pc);
    check_shared(offset, size, true, pc);
    Copy copy = {static_cast<char*>(target), size, {}};
    if (valid) memcpy(copy.bytes, source, size);
    memset(target, 0xff, size);
    for (size_t byte = offset; byte < offset + size; byte += kCellBytes) cells[byte / kCellBytes].copy_pending = true;
    fibers[current].open_copies.push_back(copy);
}

void cpu_cuda_copy_commit() {
    Fiber& fiber = fibers[current];
    fiber.copy_groups.push_back(std::move(fiber.open_copies));
    fiber.open_copies.clear();
}

void cpu_cuda_copy_wait(int pending) {
    Fiber& fiber = fibers[current];
    auto& groups = fiber.copy_groups;
    while (groups.size() > static_cast<size_t>(pending)) {
        finish_copies(groups.front());
        groups.erase(groups.begin());
    }
}

// ------------------------------------------------------------------------ what the compiler's checks call

#define ACCESS(bytes)                                                                          \
    void __tsan_read##bytes(void* address) { check(address, bytes, false, CALLER); }           \
    void __tsan_write##bytes(void* address) { check(address, bytes, true, CALLER); }           \
    void __tsan_unaligned_read##bytes(void* address) { check(address, bytes, false, CALLER); } \
    void __tsan_unaligned_write##bytes(void* address) { check(address, bytes, true, CALLER); } \
    void __tsan_volatile_read##bytes(void* address) { check(address, bytes, false, CALLER); }  \
    void __tsan_volatile_write##bytes(void* address) { check(address, bytes, true, CALLER); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* address, size_t size) { check(address, size, false, CALLER); }
void __tsan_write_range(void* address, size_t size) { check(address, size, true, CALLER); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

struct UbsanPlace {
    const char* file;
    uint32_t line;
    uint32_t column;
};

void __ubsan_handle_out_of_bounds(UbsanPlace* place, uintptr_t index) {
    fail(0, "index %lld is outside its array (%s:%u)", static_cast<long long>(index), place->file, place->line);
}
void __ubsan_handle_type_mismatch_v1(UbsanPlace* place, uintptr_t address) {
    fail(0, "address %p is not on its type's boundary (%s:%u)", reinterpret_cast<void*>(address), place->file,
         place->line);
}

// ---------------------------------------------------------------------------------- what emulator.py calls

// Chooses a mutant, -1 for none, and forgets what has been reached. Returns the number of steps since the last choice.
uint64_t runtime_choose(int which, uint64_t limit) {
    const uint64_t steps = num_steps;
    mutant = which;
    max_steps = limit;
    num_steps = 0;
    memset(runtime_reached, 0, sizeof(runtime_reached));
    return steps;
}

// Runs a grid. Returns 0, or 1 with `text` and the program counter (0: unknown) of what went wrong.
int runtime_launch(void (*kernel)(const void*), const void* params, unsigned int num_blocks, unsigned int num_threads,
                   size_t shared_bytes, const Range* ranges, int num_ranges, uint64_t seed, bool flushes, char* text,
                   size_t text_size, uintptr_t* pc) {
    const Flushing flushing(flushes);
    Launch work = {kernel, params, {ranges, ranges + num_ranges}, {}, shared_bytes, num_threads, seed};
    for (const Range& range : work.ranges)
        work.writers.emplace_back(range.writable ? new uint32_t[range.end - range.begin]() : nullptr);
    launch = &work;
    blockDim = {num_threads, 1, 1};
    gridDim = {num_blocks, 1, 1};
    failed = unchecked = false;
    last_range = 0;
    if (num_threads > kMaxThreads || num_threads % kWarpSize != 0 || shared_bytes > kMaxSharedBytes ||
        !make_stacks(num_threads)) {
        snprintf(message, sizeof(message), "%u threads with %zu bytes of shared memory cannot be launched", num_threads,
                 shared_bytes);
        failed = true;
    }
    struct sigaction inside = {}, outside;
    inside.sa_handler = [](int) { fail(0, "divides an integer by zero"); };
    inside.sa_flags = SA_NODEFER;
    sigaction(SIGFPE, &inside, &outside);
    for (unsigned int block = 0; block < num_blocks && !failed; ++block) {
        blockIdx = {block, 0, 0};
        run_block();
    }
    sigaction(SIGFPE, &outside, nullptr);
    if (failed) {
        // What the fibers were in the middle of is lost.
        for (Fiber& fiber : fibers) fiber.begun = false;
        snprintf(text, text_size, "%s", message);
        *pc = failing_pc;
    }
    launch = nullptr;
    return failed ? 1 : 0;
}

}  // extern "C"
