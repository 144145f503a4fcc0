// The slots that the rows of a pass see.
#pragma once
#include <algorithm>
#include "memory.h"

struct Run {
    int32_t start, length;
};

// The slots that rows see through one window, as runs of consecutive slots.
struct View {
    int window;            // as in `Step`
    List<Run> runs;
    List<int32_t> first;   // index of each row's first run; last, the number of runs
    List<int32_t> oldest;  // place of each row's first slot
    List<int32_t> n_seen;  // number of slots of each row

    void begin(int size) {
        window = size;
        runs.clear(), first.clear(), oldest.clear(), n_seen.clear();
    }
};

// Add the n rows of a sequence, which use the slots from `first_slot` on. Slot i before them has position i.
//
// Args: positions: of the rows. visible: (n, first_slot + n), which slots a row sees; null: all up to its own.
static inline void look(View& view, int n, int first_slot, const int32_t* positions, const uint8_t* visible) {
    const int end = first_slot + n, window = view.window;
    for (int row = 0; row < n; row++) {
        view.first.add(int32_t(view.runs.n));
        const int position = positions[row];
        const int oldest = window < 0 ? position - position % -window : window ? std::max(0, position - window + 1) : 0;
        int seen = 0;
        // Add slots [from, to) to the row's last run, or as a new one.
        auto see = [&](int from, int to) {
            Run* last = view.runs.n > size_t(view.first.last()) ? &view.runs.last() : nullptr;
            if (last && last->start + last->length == from) last->length += to - from;
            else view.runs.add({from, to - from});
            seen += to - from;
        };
        if (!visible) {
            see(oldest, first_slot + row + 1);
        } else {
            const uint8_t* sees = visible + int64_t(row) * end;
            for (int slot = std::min(oldest, first_slot); slot < first_slot;) {
                const void* from = memchr(sees + slot, 1, first_slot - slot);
                if (!from) break;
                const int start = int((const uint8_t*)from - sees);
                const void* to = memchr(from, 0, first_slot - start);
                slot = to ? int((const uint8_t*)to - sees) : first_slot;
                see(start, slot);
            }
            for (int slot = first_slot; slot < end; slot++)
                if (sees[slot] && positions[slot - first_slot] >= oldest) see(slot, slot + 1);
        }
        view.oldest.add(oldest);
        view.n_seen.add(seen);
    }
}
