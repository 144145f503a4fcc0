// Memory of passes, which is reused from pass to pass and never freed. It needs no C++ runtime library, so that the kernels can
// be built by a compiler without one, or with another one.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>

enum Failure { NO_MEMORY = 1, NO_THREAD = 2 };  // the codes that `swiftopt_run` returns

static jmp_buf failure_jump;  // `longjmp` here with a Failure ends a pass that is being prepared

// A growing array. T has no destructor, and its initial value is zero bytes. Items that `clear` removes keep their memory, which
// later items in the same positions reuse.
template <class T> struct List {
    T* items;
    size_t n, capacity;

    T& add() {
        reserve(n + 1);
        return items[n++];
    }
    void add(T value) { add() = value; }
    void reserve(size_t size) {
        if (size <= capacity) return;
        const size_t grown_size = size + size / 4 + 4;
        T* grown = (T*)realloc((void*)items, grown_size * sizeof(T));
        if (!grown) longjmp(failure_jump, NO_MEMORY);
        memset((void*)(grown + capacity), 0, (grown_size - capacity) * sizeof(T));
        items = grown, capacity = grown_size;
    }
    void clear() { n = 0; }
    T& last() { return items[n - 1]; }
    const T& last() const { return items[n - 1]; }
    T& operator[](size_t i) { return items[i]; }
    const T& operator[](size_t i) const { return items[i]; }
    T* begin() { return items; }
    T* end() { return items + n; }
    const T* begin() const { return items; }
    const T* end() const { return items + n; }
};
