// Threads that run one function together, phase by phase. They wait for each other a moment awake and then asleep, so
// that a team beside a busy program gives its processor away instead of burning it.
#pragma once
#include <atomic>
#include <climits>
#include <new>
#include <thread>
#include <vector>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

constexpr int SPINS = 4000;  // looks at a flag before sleeping: about as long as it takes to fall asleep and wake

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// A number that threads wait for to change.
struct Signal {
    std::atomic<uint32_t> value{0};
    std::atomic<int> sleepers{0};

    void wait_while(uint32_t old) {
        for (int i = 0; i < SPINS; i++) {
            if (value.load(std::memory_order_acquire) != old) return;
            relax();
        }
        sleepers.fetch_add(1);
        while (value.load() == old) {
#if defined(__linux__)
            syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
            std::this_thread::yield();
#endif
        }
        sleepers.fetch_sub(1);
    }
    void set(uint32_t to) {
        value.store(to);
#if defined(__linux__)
        if (sleepers.load()) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }
};

class Team {
  public:
    using Work = void (*)(void*, int);  // what to run on, and which thread of the team runs it

    // Run `work` on `n` threads, this one among them; callers see to it that one call runs at a time.
    void run(int n, Work work, void* on) {
        while (int(threads_.size()) < n - 1) {
            int number = int(threads_.size()) + 1;
            uint32_t seen = start_->value.load();
            threads_.emplace_back([this, number, seen] { serve(number, seen); });
            threads_.back().detach();
        }
        n_ = n, work_ = work, on_ = on;
        uint32_t count = start_->value.load() >> 8;
        start_->set(((count + 1) << 8) | uint32_t(n));
        work(on, 0);
        sync();
    }

    // Share out 0 … n - 1 in pieces of `piece`; returns when all threads have done theirs.
    template <class F> void each(int64_t n, int64_t piece, F&& body) {
        for (int64_t i; (i = next_.fetch_add(piece, std::memory_order_relaxed)) < n;) body(i, i + piece < n ? i + piece : n);
        sync();
    }

    // Nobody goes on before all threads have come here.
    void sync() {
        const int n = n_;  // before arriving: when all have, the next run may begin, with other numbers
        uint32_t phase = phase_->value.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_->set(phase + 1);
        } else {
            phase_->wait_while(phase);
        }
    }

    // After a fork only the calling thread lives on: begin with new threads and new signals.
    void forget_threads() {
        new (&threads_) std::vector<std::thread>();
        start_ = new Signal, phase_ = new Signal;
        arrived_ = 0, next_ = 0;
    }

    static constexpr int most = 255;

  private:
    // A start says in one number that it is a new one and how many threads take part: others must not look at `n_`.
    void serve(int number, uint32_t seen) {
        for (Signal* start = start_;;) {
            start->wait_while(seen);
            seen = start->value.load();
            if (uint32_t(number) < (seen & 0xff)) {
                work_(on_, number);
                sync();
            }
        }
    }
    std::vector<std::thread> threads_;
    Signal *start_ = new Signal, *phase_ = new Signal;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) int n_ = 1;
    Work work_ = nullptr;
    void* on_ = nullptr;
};
