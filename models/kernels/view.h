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

    void reset(int size) {
        window = size;
        runs.clear(), first.clear(), oldest.clear(), n_seen.clear();
    }
};

// Add the n rows of a sequence, which use the slots from `first_slot` on. Slot i before them has position i.
//
// Args: positions: of the rows. visible: (n, first_slot + n), which slots a row sees; null: all up to its own.
static inline void add_rows(View& view, int n, int first_slot, const int32_t* positions, const uint8_t* visible) {
    const int end = first_slot + n, window = view.window;
    for (int row = 0; row < n; row++) {
        view.first.add(int32_t(view.runs.n));
        const int position = positions[row];
        const int oldest = window < 0 ? position - position % -window : window ? std::max(0, position - window + 1) : 0;
        int n_seen = 0;
        // Add slots [from, to) to the row's last run, or as a new one.
        auto add_slots = [&](int from, int to) {
            Run* last = view.runs.n > size_t(view.first.last()) ? &view.runs.last() : nullptr;
            if (last && last->start + last->length == from) last->length += to - from;
            else view.runs.add({from, to - from});
            n_seen += to - from;
        };
        if (!visible) {
            add_slots(oldest, first_slot + row + 1);
        } else {
            const uint8_t* row_mask = visible + int64_t(row) * end;
            for (int slot = std::min(oldest, first_slot); slot < first_slot;) {
                const void* from = memchr(row_mask + slot, 1, first_slot - slot);
                if (!from) break;
                const int start = int((const uint8_t*)from - row_mask);
                const void* to = memchr(from, 0, first_slot - start);
                slot = to ? int((const uint8_t*)to - row_mask) : first_slot;
                add_slots(start, slot);
            }
            for (int slot = first_slot; slot < end; slot++)
                if (row_mask[slot] && positions[slot - first_slot] >= oldest) add_slots(slot, slot + 1);
        }
        view.oldest.add(oldest);
        view.n_seen.add(n_seen);
    }
}
