// Threads that run one function together, phase by phase. A thread that waits for others first spins and then sleeps, so that
// the team leaves its processors to other busy programs.
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

constexpr int SPINS = 4000;  // spins before sleeping: about as long as it takes to sleep and wake

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A number that threads can wait for to change.
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
    // Broadcast under the lock, so that a thread between its check of the value and its sleep does not miss the signal.
    void wake_all() {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
#endif
};

class Team {
  public:
    using Work = void (*)(void*, int);  // its object, and the number of the thread

    // Run `work` on n threads, including the caller's. Callers must not call it concurrently.
    void run(int n, Work work, void* on) {
        while (n_threads_ < n - 1) start_thread();
        n_ = n, work_ = work, on_ = on;
        uint32_t count = start_.value.load() >> 8;
        start_.set(((count + 1) << 8) | uint32_t(n));
        work(on, 0);
        sync();
    }

    // Distribute 0 … n - 1 in pieces of `piece`. Returns when all threads are done and one of them has then run `last`.
    template <class F, class G> void parallel_for(int64_t n, int64_t piece, F&& body, G&& last) {
        for (int64_t i; (i = next_.fetch_add(piece, std::memory_order_relaxed)) < n;) body(i, i + piece < n ? i + piece : n);
        sync(last);
    }
    template <class F> void parallel_for(int64_t n, int64_t piece, F&& body) {
        parallel_for(n, piece, body, [] {});
    }

    void sync() {
        sync([] {});
    }

    // A barrier: no thread continues before all have arrived and the last of them has run `last`.
    template <class G> void sync(G&& last) {
        const int n = n_;  // read before arriving: once all have arrived, the next run may change it
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

    // After a fork only the calling thread exists in the child: start with new threads and new signals.
    void forget_threads() {
        n_threads_ = 0;
        new (&start_) Signal, new (&phase_) Signal;
        arrived_ = 0, next_ = 0;
    }

    static constexpr int max_threads = 255;

  private:
    struct Member {  // arguments of a new thread
        Team* team;
        int number;
        uint32_t last_start;
    };

    void start_thread() {
        auto* member = (Member*)malloc(sizeof(Member));
        if (!member) longjmp(failure_jump, NO_MEMORY);
        *member = {this, n_threads_ + 1, start_.value.load()};
        auto start_routine = [](void* argument) -> void* {
            const Member started = *(Member*)argument;
            free(argument);
            started.team->serve(started.number, started.last_start);
            return nullptr;
        };
        pthread_t thread;
        if (pthread_create(&thread, nullptr, start_routine, member)) {
            free(member);
            longjmp(failure_jump, NO_THREAD);
        }
        pthread_detach(thread);
        n_threads_++;
    }

    // `start_` holds a run's count and its number of threads in one word, because threads that do not take part must not
    // read `n_`.
    void serve(int number, uint32_t last_start) {
        for (;;) {
            start_.wait_while(last_start);
            last_start = start_.value.load();
            if (uint32_t(number) < (last_start & 0xff)) {
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
