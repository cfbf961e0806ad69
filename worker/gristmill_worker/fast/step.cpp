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

namespace {

typedef uint16_t bf16;
typedef int64_t Int;

enum { QKV, OUT, GATE_UP, DOWN, LINEARS };

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
struct Step {
    Int rows, threads, longest;
    bf16 *x, *out;           // (B, h): embeddings, overwritten; and behind the final norm
    const float *cos, *sin;  // (B, D / 2)
    const Row* row;          // (B,)
    const Places* places;    // (layers, B)
    const Factors* adapters; // (adapters, layers * LINEARS)
    bf16 *normed, *qkv, *seen, *both, *inner;
    float *low, *scores;     // (B, 3 * rank); (threads, group * longest)
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
inline __m512bh load32(const bf16* at) { return (__m512bh)_mm512_loadu_si512(at); }

// e^x for x <= 0, to a few units in the last place.
inline __m512 exp16(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    const float c[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (float each : c) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(each));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
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
            Int r = item / count, j = item % count;
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

    // The low-rank update and the bias of `count` rows, in the accumulators of 32 columns of one part.
    template <int N>
    void start(__m512 (*sums)[2], Int first, Int column, Int part, const Linear& l, Int out, Int index) const {
        __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        if (l.bias) bias[0] = wide16(l.bias + column), bias[1] = wide16(l.bias + column + 16);
        for (int n = 0; n < N; n++) {
            sums[n][0] = bias[0], sums[n][1] = bias[1];
            Int adapter = s.row[first + n].adapter;
            if (adapter < 0) continue;
            const Factors& f = s.adapters[adapter * m.layers * LINEARS + index];
            const float* low = s.low + (first + n) * 3 * s.rank;
            for (Int j = part * f.rank; j < (part + 1) * f.rank; j++) {
                __m512 by = _mm512_set1_ps(low[j]);
                sums[n][0] = _mm512_fmadd_ps(wide16(f.b_t + j * out + column), by, sums[n][0]);
                sums[n][1] = _mm512_fmadd_ps(wide16(f.b_t + j * out + column + 16), by, sums[n][1]);
            }
        }
    }

    template <int N, bool RESIDUAL>
    void tile(const bf16* x, Int in, const bf16* weights, Int stride, __m512 (*sums)[2], bf16* y, Int out) const {
        for (Int pair = 0; pair < in / 2; pair++) {
            __m512bh left = load32(weights + pair * stride), right = load32(weights + pair * stride + 32);
            for (int n = 0; n < N; n++) {
                __m512bh both = (__m512bh)_mm512_set1_epi32(*(const int*)(x + n * in + 2 * pair));
                sums[n][0] = _mm512_dpbf16_ps(sums[n][0], left, both);
                sums[n][1] = _mm512_dpbf16_ps(sums[n][1], right, both);
            }
        }
        for (int n = 0; n < N; n++)
            for (int half = 0; half < 2; half++) {
                bf16* at = y + n * out + 16 * half;
                __m512 sum = sums[n][half];
                if (RESIDUAL) sum = _mm512_add_ps(wide16(at), wide16(_mm512_cvtneps_pbh(sum)));
                put16(at, sum);
            }
    }

    template <int N, bool RESIDUAL>
    void some(const bf16* x, Int in, const bf16* weights, Int stride, bf16* y, Int out, Int first, Int column,
              Int part, const Linear& l, Int index) const {
        __m512 sums[N][2];
        start<N>(sums, first, column, part, l, out, index);
        tile<N, RESIDUAL>(x + first * in, in, weights, stride, sums, y + first * out + column, out);
    }

    // y = W x + bias + update (y += with RESIDUAL). `ends`: of the parts, in columns.
    template <bool RESIDUAL>
    void linear(const bf16* x, Int in, bf16* y, Int out, int which, Int layer, const Int* ends) {
        const Linear& l = m.table[layer].linears[which];
        Int block = m.blocks[which], index = layer * LINEARS + which, units = out / 32, part = 0;
        for (Int unit = begin(units); unit < end(units); unit++) {
            Int column = 32 * unit;
            while (column >= ends[part]) part++;
            const bf16* weights = l.packed + column / block * block * in + column % block * 2;
            Int r = 0;
            for (; r + 8 <= s.rows; r += 8)
                some<8, RESIDUAL>(x, in, weights, 2 * block, y, out, r, column, part, l, index);
            for (; r + 4 <= s.rows; r += 4)
                some<4, RESIDUAL>(x, in, weights, 2 * block, y, out, r, column, part, l, index);
            for (; r + 2 <= s.rows; r += 2)
                some<2, RESIDUAL>(x, in, weights, 2 * block, y, out, r, column, part, l, index);
            if (r < s.rows) some<1, RESIDUAL>(x, in, weights, 2 * block, y, out, r, column, part, l, index);
        }
        ready();
    }

    void turn(bf16* head, const bf16* weight, const float* cos, const float* sin) const {
        Int half = m.head_size / 2;
        if (weight) norm(head, weight, head, m.head_size);
        for (Int i = 0; i < half; i++) {
            float a = wide(head[i]), b = wide(head[half + i]);
            head[i] = narrow(a * cos[i] - b * sin[i]);
            head[half + i] = narrow(b * cos[i] + a * sin[i]);
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
            for (Int i = 0; i < size; i++) keys[row.own * size + i] = k[i], values[row.own * size + i] = v[i];
            attend(row, at, kv, keys, values, l.window, q, s.seen + r * m.heads * size + kv * group * size);
        }
        ready();
    }

    void attend(const Row& row, const Places& at, Int kv, const bf16* keys, const bf16* values, Int window,
                const bf16* q, bf16* out) const {
        Int size = m.head_size, length = row.shared + row.own + 1, group = m.heads / m.kv_heads;
        Int first = window && window < length ? length - window : 0;
        // Positions from `first` on: those of the prompt that are shared, then the row's own.
        const bf16 *ks[2] = {at.shared_keys + kv * row.shared_room * size, keys};
        const bf16 *vs[2] = {at.shared_values + kv * row.shared_room * size, values};
        Int from[2] = {first < row.shared ? first : row.shared, first < row.shared ? 0 : first - row.shared};
        Int to[2] = {row.shared, row.own + 1};
        float* scores = s.scores + me * group * s.longest;
        for (Int g = 0; g < group; g++) {
            float *mine = scores + g * s.longest, *next = mine, most = -INFINITY;
            for (int part = 0; part < 2; part++)
                for (Int t = from[part]; t < to[part]; t++) {
                    __m512 sum = _mm512_setzero_ps();
                    for (Int i = 0; i < size; i += 32)
                        sum = _mm512_dpbf16_ps(sum, load32(q + g * size + i), load32(ks[part] + t * size + i));
                    float score = _mm512_reduce_add_ps(sum) * s.scale;
                    most = score > most ? score : most;
                    *next++ = score;
                }
            Int count = next - mine;
            for (; (next - mine) % 16; next++) *next = -INFINITY;
            __m512 sum = _mm512_setzero_ps();
            for (Int i = 0; i < count; i += 16) {
                __m512 p = exp16(_mm512_sub_ps(_mm512_loadu_ps(mine + i), _mm512_set1_ps(most)));
                if (i + 16 > count) p = _mm512_maskz_mov_ps((1u << (count - i)) - 1, p);
                sum = _mm512_add_ps(sum, p);
                _mm512_storeu_ps(mine + i, p);
            }
            __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
            for (Int i = 0; i < size; i += 32) {
                __m512 left = _mm512_setzero_ps(), right = left;
                const float* p = mine;
                for (int part = 0; part < 2; part++)
                    for (Int t = from[part]; t < to[part]; t++, p++) {
                        left = _mm512_fmadd_ps(_mm512_set1_ps(*p), wide16(vs[part] + t * size + i), left);
                        right = _mm512_fmadd_ps(_mm512_set1_ps(*p), wide16(vs[part] + t * size + i + 16), right);
                    }
                put16(out + g * size + i, _mm512_mul_ps(left, by));
                put16(out + g * size + i + 16, _mm512_mul_ps(right, by));
            }
        }
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
