// Memory of passes: used again pass after pass, and never given back. Nothing here needs the C++ library at run time, so a
// compiler that brings none, or another one, makes the same library.
#pragma once
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>

enum Failure { NO_MEMORY = 1, NO_THREAD = 2 };  // what `swiftopt_run` returns

static jmp_buf failed;  // where a pass that is being prepared ends with one of these

// Values one after the other. T has no destructor, and zero bytes are its initial value. What is taken out by `clear` keeps
// the memory that it holds itself, for what is added in its place.
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
