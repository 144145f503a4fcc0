// Threads that run one function together, phase by phase. They wait for each other a moment awake and then asleep, so
// that a team beside a busy program gives its processor away instead of burning it.
#pragma once
#include <atomic>
#include <climits>
#include <new>
#include <pthread.h>
#include <unistd.h>
#include "memory.h"
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

constexpr int SPINS = 4000;  // looks at a flag before sleeping: about as long as it takes to fall asleep and wake

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
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
        while (value.load() == old) sleep_while(old);
        sleepers.fetch_sub(1);
    }
    void set(uint32_t to) {
        value.store(to);
        if (sleepers.load()) wake_all();
    }

  private:
#if defined(__linux__)
    void sleep_while(uint32_t old) { syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0); }
    void wake_all() { syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

    void sleep_while(uint32_t old) {
        pthread_mutex_lock(&lock);
        if (value.load() == old) pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
    }
    // Under the lock: who has looked at the value and is not asleep yet must not miss it.
    void wake_all() {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
#endif
};

class Team {
  public:
    using Work = void (*)(void*, int);  // what to run on, and which thread of the team runs it

    // Run `work` on `n` threads, this one among them; callers see to it that one call runs at a time.
    void run(int n, Work work, void* on) {
        while (n_threads_ < n - 1) start_thread();
        n_ = n, work_ = work, on_ = on;
        uint32_t count = start_.value.load() >> 8;
        start_.set(((count + 1) << 8) | uint32_t(n));
        work(on, 0);
        sync();
    }

    // Share out 0 … n - 1 in pieces of `piece`; returns when all threads have done theirs, and one of them then `last`.
    template <class F, class G> void each(int64_t n, int64_t piece, F&& body, G&& last) {
        for (int64_t i; (i = next_.fetch_add(piece, std::memory_order_relaxed)) < n;) body(i, i + piece < n ? i + piece : n);
        sync(last);
    }
    template <class F> void each(int64_t n, int64_t piece, F&& body) {
        each(n, piece, body, [] {});
    }

    void sync() {
        sync([] {});
    }

    // Nobody goes on before all threads have come here, and the last of them has done `last`.
    template <class G> void sync(G&& last) {
        const int n = n_;  // before arriving: when all have, the next run may begin, with other numbers
        uint32_t phase = phase_.value.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == n - 1) {
            last();
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.set(phase + 1);
        } else {
            phase_.wait_while(phase);
        }
    }

    // After a fork only the calling thread lives on: begin with new threads and new signals.
    void forget_threads() {
        n_threads_ = 0;
        new (&start_) Signal, new (&phase_) Signal;
        arrived_ = 0, next_ = 0;
    }

    static constexpr int most = 255;

  private:
    struct Member {  // what a new thread is told
        Team* team;
        int number;
        uint32_t seen;
    };

    void start_thread() {
        auto* member = (Member*)malloc(sizeof(Member));
        if (!member) longjmp(failed, NO_MEMORY);
        *member = {this, n_threads_ + 1, start_.value.load()};
        auto serve_member = [](void* told) -> void* {
            const Member its = *(Member*)told;
            free(told);
            its.team->serve(its.number, its.seen);
            return nullptr;
        };
        pthread_t thread;
        if (pthread_create(&thread, nullptr, serve_member, member)) {
            free(member);
            longjmp(failed, NO_THREAD);
        }
        pthread_detach(thread);
        n_threads_++;
    }

    // A start says in one number that it is a new one and how many threads take part: others must not look at `n_`.
    void serve(int number, uint32_t seen) {
        for (;;) {
            start_.wait_while(seen);
            seen = start_.value.load();
            if (uint32_t(number) < (seen & 0xff)) {
                work_(on_, number);
                sync();
            }
        }
    }
    int n_threads_ = 0;
    alignas(64) Signal start_;
    alignas(64) Signal phase_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) int n_ = 1;
    Work work_ = nullptr;
    void* on_ = nullptr;
};
