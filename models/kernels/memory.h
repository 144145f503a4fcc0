// Memory of passes, which is reused from pass to pass and never freed. Nothing here needs the C++ runtime library, so the
// kernels can be built with a compiler that has none, or another one.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>

enum Failure { NO_MEMORY = 1, NO_THREAD = 2 };  // what `swiftopt_run` returns

static jmp_buf failed;  // `longjmp` here with a Failure ends a pass that is being prepared

// A growing array. T has no destructor, and its initial value is zero bytes. Items that `clear` removes keep the memory that
// they own, for the items that take their place.
template <class T> struct List {
    T* items;
    size_t n, room;

    T& add() {
        reserve(n + 1);
        return items[n++];
    }
    void add(T value) { add() = value; }
    void reserve(size_t wanted) {
        if (wanted <= room) return;
        const size_t more = wanted + wanted / 4 + 4;
        T* grown = (T*)realloc((void*)items, more * sizeof(T));
        if (!grown) longjmp(failed, NO_MEMORY);
        memset((void*)(grown + room), 0, (more - room) * sizeof(T));
        items = grown, room = more;
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
