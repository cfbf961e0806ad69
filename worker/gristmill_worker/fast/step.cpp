// One decode step of a Llama-shaped decoder in bf16: every layer, for all rows of the batch, in one call.
//
// A row's numbers are reckoned in the same order whoever shares the batch, and however many threads there
// are: each output is the sum of one thread, over the inner dimension from its beginning to its end.
// Sizes are of elements. Weights are as oneDNN packed them: for each block of columns, for each pair of
// inner indices, the pair of each column.
#include <immintrin.h>
#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

typedef uint16_t bf16;
typedef int64_t Int;

enum { QKV, OUT, GATE_UP, DOWN, LINEARS };
enum { ROWS = 48, PAIRS = 48, G_MAX = 4 };  // that are worked on at once: within the nearest cache

struct Linear {
    const bf16 *packed, *bias;  // bias may be null
};
struct Layer {
    const bf16 *before_attention, *before_mlp, *q_norm, *k_norm;  // the last two may be null
    Int window;                                                   // 0 = all positions
    Linear linears[LINEARS];
};
struct Model {
    Int layers, hidden, heads, kv_heads, head_size, inner;
    Int blocks[LINEARS];  // columns of a block of the packed weights
    const bf16* final_norm;
    const Layer* table;
};
struct Factors {
    const bf16 *a, *b_t;  // (parts * rank, in) and (parts * rank, out), block diagonal
    Int rank;
};
struct Row {
    Int adapter;                // its place in `adapters`; -1 = none
    Int shared, own;            // positions behind it: the prompt's that it shares, and its own
    Int shared_room, own_room;  // positions from one head to the next
};
struct Places {
    bf16 *own_keys, *own_values;
    const bf16 *shared_keys, *shared_values;
};
struct Part {  // consecutive positions of one head
    const bf16 *keys, *values;
    Int count;
};
struct Step {
    Int rows, threads, longest;
    bf16 *x, *out;           // (B, h): embeddings, overwritten; and behind the final norm
    const float *cos, *sin;  // (B, D / 2)
    const Row* row;          // (B,)
    const Places* places;    // (layers, B)
    const Factors* adapters; // (adapters, layers * LINEARS)
    bf16 *normed, *qkv, *seen, *both, *inner;
    float *low, *scores;     // (B, 3 * rank); (threads, 4 * longest)
    Int rank;                // the highest of the adapters
    float eps, scale;
};

inline float wide(bf16 x) {
    union { uint32_t bits; float value; } u = {uint32_t(x) << 16};
    return u.value;
}
inline bf16 narrow(float x) {
    union { float value; uint32_t bits; } u = {x};
    if ((u.bits & 0x7fffffffu) > 0x7f800000u) return bf16(u.bits >> 16 | 0x40);
    return bf16((u.bits + 0x7fffu + (u.bits >> 16 & 1)) >> 16);
}
inline __m512 wide16(const bf16* at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}
inline __m512 wide16(__m256bh x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16));
}
inline void put16(bf16* at, __m512 x) { _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x)); }
// What is asked for may lie behind the end of an array: nothing is read then.
inline void soon(const bf16* at) { _mm_prefetch((const char*)at, _MM_HINT_T0); }
inline __m512bh load32(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

// e^x for x <= 0, to a few units in the last place; of what is not a number, not a number.
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // the second one where they do not compare
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    const float c[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (float each : c) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(each));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// The sums of each of 16 vectors' elements.
inline __m512 sums_of(const __m512* v) {
    __m512 four[4];
    for (int i = 0; i < 4; i++) {
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i], v[4 * i + 1]), _mm512_unpackhi_ps(v[4 * i], v[4 * i + 1]));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i + 2], v[4 * i + 3]), _mm512_unpackhi_ps(v[4 * i + 2], v[4 * i + 3]));
        __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    for (int i = 0; i < 4; i += 2)
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[i], four[i + 1], 0x88), _mm512_shuffle_f32x4(four[i], four[i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[2], 0x88), _mm512_shuffle_f32x4(four[0], four[2], 0xdd));
}

// Threads wait for each other a little while busily, then asleep: other processes want the cores too.
class Barrier {
    std::atomic<int> arrived{0}, turn{0}, asleep{0};
    static const int SPINS = 4000;

  public:
    void wait(int threads) {
        if (threads == 1) return;
        int mine = turn.load();
        if (arrived.fetch_add(1) + 1 == threads) {
            arrived.store(0);
            turn.store(mine + 1);
            if (asleep.load()) syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
            return;
        }
        for (int i = 0; i < SPINS; i++) {
            if (turn.load(std::memory_order_acquire) != mine) return;
            _mm_pause();
        }
        asleep.fetch_add(1);
        while (turn.load() == mine) syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, mine, nullptr, nullptr, 0);
        asleep.fetch_sub(1);
    }
};

struct Worker {  // one thread of a step
    const Model& m;
    const Step& s;
    Barrier& barrier;
    int me, threads;

    void ready() { barrier.wait(threads); }
    Int begin(Int count) const { return count * me / threads; }
    Int end(Int count) const { return count * (me + 1) / threads; }

    void norm(const bf16* x, const bf16* weight, bf16* out, Int size) const {
        __m512 sum = _mm512_setzero_ps();
        for (Int i = 0; i < size; i += 16) {
            __m512 v = wide16(x + i);
            sum = _mm512_fmadd_ps(v, v, sum);
        }
        __m512 by = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(sum) / size + s.eps));
        for (Int i = 0; i < size; i += 16) {
            __m512 normed = wide16(_mm512_cvtneps_pbh(_mm512_mul_ps(wide16(x + i), by)));
            put16(out + i, _mm512_mul_ps(normed, wide16(weight + i)));
        }
    }

    void norms(const bf16* weight, bf16* out) {
        for (Int r = begin(s.rows); r < end(s.rows); r++)
            norm(s.x + r * m.hidden, weight, out + r * m.hidden, m.hidden);
        ready();
    }

    // low = x A^T of each row's own adapter, rounded as the training pass rounds it.
    void lows(const bf16* x, Int in, int linear, Int layer, Int parts) {
        Int count = parts * s.rank;
        for (Int item = begin(s.rows * count); item < end(s.rows * count); item++) {
            Int r = item % s.rows, j = item / s.rows;
            if (s.row[r].adapter < 0) continue;
            const Factors& f = s.adapters[s.row[r].adapter * m.layers * LINEARS + layer * LINEARS + linear];
            if (j >= parts * f.rank) continue;
            const bf16 *a = f.a + j * in, *own = x + r * in;
            __m512 sum = _mm512_setzero_ps();
            for (Int i = 0; i < in; i += 32) sum = _mm512_dpbf16_ps(sum, load32(a + i), load32(own + i));
            s.low[r * 3 * s.rank + j] = wide(narrow(_mm512_reduce_add_ps(sum)));
        }
        ready();
    }

    // Bias and low-rank update of N rows that share an adapter, in the accumulators of 32 columns of one part.
    template <int N>
    void start(__m512 (*sums)[4], Int r, Int column, Int part, const Linear& l, Int out, Int index) const {
        __m512 own[N][2], left = _mm512_setzero_ps(), right = left;
        if (l.bias) left = wide16(l.bias + column), right = wide16(l.bias + column + 16);
        for (int n = 0; n < N; n++) own[n][0] = left, own[n][1] = right;
        Int adapter = s.row[r].adapter;
        if (adapter >= 0) {
            const Factors& f = s.adapters[adapter * m.layers * LINEARS + index];
            for (Int j = part * f.rank; j < (part + 1) * f.rank; j++) {
                left = wide16(f.b_t + j * out + column), right = wide16(f.b_t + j * out + column + 16);
                for (int n = 0; n < N; n++) {
                    __m512 by = _mm512_set1_ps(s.low[(r + n) * 3 * s.rank + j]);
                    own[n][0] = _mm512_fmadd_ps(left, by, own[n][0]);
                    own[n][1] = _mm512_fmadd_ps(right, by, own[n][1]);
                }
            }
        }
        for (int n = 0; n < N; n++) sums[n][0] = own[n][0], sums[n][1] = own[n][1];
    }

    void starts(__m512 (*sums)[4], Int first, Int rows, Int column, Int part, const Linear& l, Int out, Int index) const {
        for (Int r = 0; r < rows;) {
            Int alike = 1;
            while (alike < 8 && r + alike < rows && s.row[first + r + alike].adapter == s.row[first + r].adapter) alike++;
            if (alike == 8) start<8>(sums + r, first + r, column, part, l, out, index), r += 8;
            else if (alike >= 4) start<4>(sums + r, first + r, column, part, l, out, index), r += 4;
            else start<1>(sums + r, first + r, column, part, l, out, index), r += 1;
        }
    }

    // What `pairs` pairs of inner indices add to the accumulators of N rows and 16 C columns.
    template <int N, int C>
    static void add(const bf16* x, Int in, const bf16* weights, Int stride, Int pairs, __m512 (*sums)[4]) {
        __m512 own[N][C];
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) own[n][c] = sums[n][c];
        for (Int pair = 0; pair < pairs; pair++) {
            __m512bh w[C];
            for (int c = 0; c < C; c++) {
                w[c] = load32(weights + pair * stride + 32 * c);
                if (N > 2) soon(weights + (pair + PAIRS) * stride + 32 * c);
            }
            for (int n = 0; n < N; n++) {
                __m512bh both = (__m512bh)_mm512_set1_epi32(*(const int*)(x + n * in + 2 * pair));
                for (int c = 0; c < C; c++) own[n][c] = _mm512_dpbf16_ps(own[n][c], w[c], both);
            }
        }
        for (int n = 0; n < N; n++)
            for (int c = 0; c < C; c++) sums[n][c] = own[n][c];
    }

    template <int C>
    static void add(Int rows, const bf16* x, Int in, const bf16* weights, Int stride, Int pairs, __m512 (*sums)[4]) {
        Int tiles = (rows + 5) / 6;
        for (Int tile = 0; tile < tiles; tile++) {
            Int from = rows * tile / tiles, count = rows * (tile + 1) / tiles - from;
            const bf16* own = x + from * in;
            switch (count) {
                case 1: add<1, C>(own, in, weights, stride, pairs, sums + from); break;
                case 2: add<2, C>(own, in, weights, stride, pairs, sums + from); break;
                case 3: add<3, C>(own, in, weights, stride, pairs, sums + from); break;
                case 4: add<4, C>(own, in, weights, stride, pairs, sums + from); break;
                case 5: add<5, C>(own, in, weights, stride, pairs, sums + from); break;
                default: add<6, C>(own, in, weights, stride, pairs, sums + from);
            }
        }
    }

    // y = W x + bias + update (y += with RESIDUAL). `ends`: of the parts, in columns. A few pairs of weights
    // at a time serve all rows, so that they come from memory once.
    template <bool RESIDUAL>
    void linear(const bf16* x, Int in, bf16* y, Int out, int which, Int layer, const Int* ends) {
        const Linear& l = m.table[layer].linears[which];
        Int block = m.blocks[which], last = 32 * end(out / 32);
        __m512 sums[ROWS][4];
        int columns;
        for (Int column = 32 * begin(out / 32); column < last; column += 16 * columns) {
            columns = column % block + 64 <= block && column + 64 <= last ? 4 : 2;
            const bf16* weights = l.packed + column / block * block * in + column % block * 2;
            for (Int first = 0; first < s.rows; first += ROWS) {
                Int rows = s.rows - first < ROWS ? s.rows - first : ROWS;
                for (int c = 0; c < columns; c += 2) {
                    Int part = 0;
                    while (column + 16 * c >= ends[part]) part++;
                    starts((__m512(*)[4])(&sums[0][c]), first, rows, column + 16 * c, part, l, out, layer * LINEARS + which);
                }
                Int most = rows > 6 ? Int(PAIRS) : in / 2;
                for (Int pair = 0; pair < in / 2; pair += most) {
                    Int pairs = in / 2 - pair < most ? in / 2 - pair : most;
                    const bf16 *own = x + first * in + 2 * pair, *some = weights + 2 * pair * block;
                    if (columns == 4) add<4>(rows, own, in, some, 2 * block, pairs, sums);
                    else add<2>(rows, own, in, some, 2 * block, pairs, sums);
                }
                for (Int r = 0; r < rows; r++)
                    for (int c = 0; c < columns; c++) {
                        bf16* at = y + (first + r) * out + column + 16 * c;
                        __m512 sum = sums[r][c];
                        if (RESIDUAL) sum = _mm512_add_ps(wide16(at), wide16(_mm512_cvtneps_pbh(sum)));
                        put16(at, sum);
                    }
            }
        }
        ready();
    }

    void turn(bf16* head, const bf16* weight, const float* cos, const float* sin) const {
        Int half = m.head_size / 2;
        if (weight) norm(head, weight, head, m.head_size);
        for (Int i = 0; i < half; i += 16) {
            __m512 a = wide16(head + i), b = wide16(head + half + i);
            __m512 c = _mm512_loadu_ps(cos + i), d = _mm512_loadu_ps(sin + i);
            put16(head + i, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, d)));
            put16(head + half + i, _mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, d)));
        }
    }

    void look_back(Int layer) {
        const Layer& l = m.table[layer];
        Int group = m.heads / m.kv_heads, size = m.head_size, width = (m.heads + 2 * m.kv_heads) * size;
        for (Int item = begin(s.rows * m.kv_heads); item < end(s.rows * m.kv_heads); item++) {
            Int r = item / m.kv_heads, kv = item % m.kv_heads;
            const Row& row = s.row[r];
            const Places& at = s.places[layer * s.rows + r];
            bf16 *q = s.qkv + r * width + kv * group * size, *k = s.qkv + r * width + (m.heads + kv) * size;
            const bf16* v = k + m.kv_heads * size;
            const float *cos = s.cos + r * size / 2, *sin = s.sin + r * size / 2;
            for (Int g = 0; g < group; g++) turn(q + g * size, l.q_norm, cos, sin);
            turn(k, l.k_norm, cos, sin);
            bf16 *keys = at.own_keys + kv * row.own_room * size, *values = at.own_values + kv * row.own_room * size;
            std::memcpy(keys + row.own * size, k, size * sizeof(bf16));
            std::memcpy(values + row.own * size, v, size * sizeof(bf16));
            // Positions from `first` on: those of the prompt that are shared, then the row's own.
            Int length = row.shared + row.own + 1, first = l.window && l.window < length ? length - l.window : 0;
            Int before = first < row.shared ? first : row.shared, skipped = (first - before) * size;
            Part parts[2] = {
                {at.shared_keys + (kv * row.shared_room + before) * size,
                 at.shared_values + (kv * row.shared_room + before) * size, row.shared - before},
                {keys + skipped, values + skipped, row.own + 1 - (first - before)}};
            bf16* out = s.seen + r * m.heads * size + kv * group * size;
            for (Int g = 0; g < group;) {
                Int left = group - g;
                if (left >= 4) attend<4>(parts, q + g * size, out + g * size), g += 4;
                else if (left == 3) attend<3>(parts, q + g * size, out + g * size), g += 3;
                else if (left == 2) attend<2>(parts, q + g * size, out + g * size), g += 2;
                else attend<1>(parts, q + g * size, out + g * size), g += 1;
            }
        }
        ready();
    }

    // G heads that share keys and values.
    template <int G>
    void attend(const Part* parts, const bf16* q, bf16* out) const {
        Int size = m.head_size;
        float *scores = s.scores + me * G_MAX * s.longest, most[G];
        for (int g = 0; g < G; g++) most[g] = -INFINITY;
        Int at = 0;
        for (int part = 0; part < 2; part++) at = score<G>(parts[part], q, scores, at, most);
        for (int g = 0; g < G; g++) weigh(scores + g * s.longest, at, most[g]);
        for (Int i = 0; i < size; i += 32) {
            __m512 sums[G][2];
            for (int g = 0; g < G; g++) sums[g][0] = sums[g][1] = _mm512_setzero_ps();
            const float* p = scores;
            for (int part = 0; part < 2; part++)
                for (Int t = 0; t < parts[part].count; t++, p++) {
                    const bf16* v = parts[part].values + t * size + i;
                    __m512 left = wide16(v), right = wide16(v + 16);
                    for (int g = 0; g < G; g++) {
                        __m512 by = _mm512_set1_ps(p[g * s.longest]);
                        sums[g][0] = _mm512_fmadd_ps(by, left, sums[g][0]);
                        sums[g][1] = _mm512_fmadd_ps(by, right, sums[g][1]);
                    }
                }
            for (int g = 0; g < G; g++)
                for (int half = 0; half < 2; half++) put16(out + g * size + i + 16 * half, sums[g][half]);
        }
    }

    // Scores of one part's positions, put at `at` and behind; the place behind them.
    template <int G>
    Int score(const Part& part, const bf16* q, float* scores, Int at, float* most) const {
        Int size = m.head_size;
        for (Int t = 0; t < part.count; t += 16) {
            Int count = part.count - t < 16 ? part.count - t : 16;
            __mmask16 there = __mmask16((1u << count) - 1);
            for (Int i = 0; i < 16 * size; i += 32) {
                soon(part.keys + (t + 16) * size + i);
                soon(part.values + t * size + i);
            }
            for (int g = 0; g < G; g++) {
                __m512 sums[16];
                for (int n = 0; n < 16; n++) {
                    const bf16* k = part.keys + (t + (n < count ? n : 0)) * size;
                    sums[n] = _mm512_setzero_ps();
                    for (Int i = 0; i < size; i += 32)
                        sums[n] = _mm512_dpbf16_ps(sums[n], load32(k + i), load32(q + g * size + i));
                }
                __m512 found = _mm512_mul_ps(sums_of(sums), _mm512_set1_ps(s.scale));
                _mm512_mask_storeu_ps(scores + g * s.longest + at + t, there, found);
                float here = _mm512_mask_reduce_max_ps(there, found);
                most[g] = here > most[g] ? here : most[g];
            }
        }
        return at + part.count;
    }

    // Scores become probabilities.
    static void weigh(float* scores, Int count, float most) {
        __m512 sum = _mm512_setzero_ps();
        for (Int i = 0; i < count; i += 16) {
            __mmask16 there = count - i < 16 ? __mmask16((1u << (count - i)) - 1) : __mmask16(-1);
            __m512 p = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(there, scores + i), _mm512_set1_ps(most)));
            sum = _mm512_mask_add_ps(sum, there, sum, p);
            _mm512_mask_storeu_ps(scores + i, there, p);
        }
        float by = 1.0f / _mm512_reduce_add_ps(sum);
        for (Int i = 0; i < count; i++) scores[i] *= by;
    }

    void swiglu() {
        Int each = m.inner / 16;
        for (Int item = begin(s.rows * each); item < end(s.rows * each); item++) {
            Int r = item / each, i = item % each * 16;
            __m512 gate = wide16(s.both + r * 2 * m.inner + i), up = wide16(s.both + r * 2 * m.inner + m.inner + i);
            // 1 / (1 + e^-|g|), and what is left of 1 for a negative gate.
            __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(gate)));
            __mmask16 below = _mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ);
            __m512 one = _mm512_set1_ps(1.0f);
            __m512 sigmoid = _mm512_div_ps(_mm512_mask_mov_ps(one, below, e), _mm512_add_ps(one, e));
            put16(s.inner + r * m.inner + i, _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up));
        }
        ready();
    }

    void run() {
        Int h = m.hidden, q = m.heads * m.head_size, kv = m.kv_heads * m.head_size, f = m.inner;
        const Int qkv[] = {q, q + kv, q + 2 * kv}, whole[] = {h}, halves[] = {f, 2 * f};
        for (Int layer = 0; layer < m.layers; layer++) {
            norms(m.table[layer].before_attention, s.normed);
            lows(s.normed, h, QKV, layer, 3);
            linear<false>(s.normed, h, s.qkv, q + 2 * kv, QKV, layer, qkv);
            look_back(layer);
            lows(s.seen, q, OUT, layer, 1);
            linear<true>(s.seen, q, s.x, h, OUT, layer, whole);
            norms(m.table[layer].before_mlp, s.normed);
            lows(s.normed, h, GATE_UP, layer, 2);
            linear<false>(s.normed, h, s.both, 2 * f, GATE_UP, layer, halves);
            swiglu();
            lows(s.inner, f, DOWN, layer, 1);
            linear<true>(s.inner, f, s.x, h, DOWN, layer, whole);
        }
        norms(m.final_norm, s.out);
    }
};

}  // namespace

extern "C" void gristmill_step(const Model* model, const Step* step) {
    Barrier barrier;
#pragma omp parallel num_threads(int(step->threads))
    {
        Worker worker{*model, *step, barrier, omp_get_thread_num(), omp_get_num_threads()};
        worker.run();
    }
}
