// A tensor: where it begins in its buffer, in bytes, and ggml's ne, nb and type.
typedef struct { long at, ne[4], nb[4]; int type, pad; } T;
typedef __global char *mem;

enum { F32, F16, Q8_0, Q4_0, Q4_1, I32, I64 };

// Offset of the element i of a tensor, counted in logical order; repeats what is smaller than that.
static long place(const T *t, long i0, long i1, long i2, long i3) {
    return t->at + (i1 % t->ne[1]) * t->nb[1] + (i2 % t->ne[2]) * t->nb[2] + (i3 % t->ne[3]) * t->nb[3];
}

static void unravel(const T *t, long i, long *i0, long *i1, long *i2, long *i3) {
    *i0 = i % t->ne[0]; i /= t->ne[0];
    *i1 = i % t->ne[1]; i /= t->ne[1];
    *i2 = i % t->ne[2]; *i3 = i / t->ne[2];
}

static float half_at(__global const char *p) { return vload_half(0, (__global const half *) p); }

// Element i of a row.
static float get(mem row, long i, long nb0, int type) {
    switch (type) {
        case F32: return *(__global float *) (row + i * nb0);
        case F16: return half_at(row + i * nb0);
        case Q8_0: { mem b = row + i / 32 * 34; return half_at(b) * ((__global char *) b)[2 + i % 32]; }
        case Q4_0: {
            mem b = row + i / 32 * 18;
            uchar q = ((__global uchar *) b)[2 + i % 16];
            return half_at(b) * (float) ((i % 32 < 16 ? q & 15 : q >> 4) - 8);
        }
        case Q4_1: {
            mem b = row + i / 32 * 20;
            uchar q = ((__global uchar *) b)[4 + i % 16];
            return half_at(b) * (float) (i % 32 < 16 ? q & 15 : q >> 4) + half_at(b + 2);
        }
    }
    return NAN;
}

static void put(mem row, long i, long nb0, int type, float x) {
    if (type == F32) *(__global float *) (row + i * nb0) = x;
    else vstore_half_rte(x, 0, (__global half *) (row + i * nb0));
}

static long id_at(mem p, int type) { return type == I64 ? *(__global long *) p : *(__global int *) p; }

#define INDEX long i0, i1, i2, i3; unravel(&d, get_global_id(0), &i0, &i1, &i2, &i3)
#define DST put(md + place(&d, i0, i1, i2, i3), i0, d.nb[0], d.type,
#define AT(m, t) get(m + place(&t, i0, i1, i2, i3), i0 % t.ne[0], t.nb[0], t.type)

__kernel void add(mem md, T d, mem ma, T a, mem mb, T b) { INDEX; DST AT(ma, a) + AT(mb, b)); }
__kernel void mul(mem md, T d, mem ma, T a, mem mb, T b) { INDEX; DST AT(ma, a) * AT(mb, b)); }
__kernel void scale(mem md, T d, mem ma, T a, float s, float bias) { INDEX; DST AT(ma, a) * s + bias); }

// gate and up are two tensors, or the halves of one's rows
__kernel void swiglu(mem md, T d, mem ma, T a, mem mb, T b, long gate_at, long up_at) {
    INDEX;
    float x = get(ma + place(&a, i0, i1, i2, i3), i0 + gate_at, a.nb[0], a.type);
    float g = get(mb + place(&b, i0, i1, i2, i3), i0 + up_at, b.nb[0], b.type);
    DST x / (1.0f + exp(-x)) * g);
}

__kernel void copy(mem md, T d, mem ma, T a) {
    INDEX;
    long j0, j1, j2, j3;
    unravel(&a, get_global_id(0), &j0, &j1, &j2, &j3);
    DST get(ma + place(&a, j0, j1, j2, j3), j0, a.nb[0], a.type));
}

__kernel void get_rows(mem md, T d, mem ma, T a, mem mb, T b) {
    INDEX;
    long row = id_at(mb + place(&b, 0, i2, i3, 0) + i1 * b.nb[0], b.type);
    DST get(ma + place(&a, 0, row, i2, i3), i0, a.nb[0], a.type));
}

// one work item for each element of the source; d is the tensor whose rows are set
__kernel void set_rows(mem md, T d, mem ma, T a, mem mb, T b) {
    long i0, i1, i2, i3;
    unravel(&a, get_global_id(0), &i0, &i1, &i2, &i3);
    long row = id_at(mb + place(&b, 0, i2, i3, 0) + i1 * b.nb[0], b.type);
    put(md + place(&d, 0, row, i2, i3), i0, d.nb[0], d.type, get(ma + place(&a, 0, i1, i2, i3), i0, a.nb[0], a.type));
}

// one work item for each row
__kernel void rms_norm(mem md, T d, mem ma, T a, float eps) {
    long r = get_global_id(0), i1 = r % d.ne[1], i2 = r / d.ne[1] % d.ne[2], i3 = r / d.ne[1] / d.ne[2];
    mem x = ma + place(&a, 0, i1, i2, i3), y = md + place(&d, 0, i1, i2, i3);
    double sum = 0;
    for (long i = 0; i < d.ne[0]; i++) { float v = get(x, i, a.nb[0], F32); sum += v * v; }
    float s = 1.0f / sqrt((float) (sum / d.ne[0]) + eps);
    for (long i = 0; i < d.ne[0]; i++) put(y, i, d.nb[0], F32, get(x, i, a.nb[0], F32) * s);
}

__kernel void soft_max(mem md, T d, mem ma, T a, mem mm, T m, int masked, float s) {
    long r = get_global_id(0), i1 = r % d.ne[1], i2 = r / d.ne[1] % d.ne[2], i3 = r / d.ne[1] / d.ne[2];
    mem x = ma + place(&a, 0, i1, i2, i3), y = md + place(&d, 0, i1, i2, i3), k = mm + place(&m, 0, i1, i2, i3);
    float most = -INFINITY;
    for (long i = 0; i < d.ne[0]; i++) {
        float v = get(x, i, a.nb[0], F32) * s + (masked ? get(k, i, m.nb[0], m.type) : 0.0f);
        put(y, i, d.nb[0], F32, v);
        most = fmax(most, v);
    }
    double sum = 0;
    for (long i = 0; i < d.ne[0]; i++) {
        float e = exp(get(y, i, d.nb[0], F32) - most);
        put(y, i, d.nb[0], F32, e);
        sum += e;
    }
    float n = (float) (1.0 / sum);
    for (long i = 0; i < d.ne[0]; i++) put(y, i, d.nb[0], F32, get(y, i, d.nb[0], F32) * n);
}

// one work item for each pair of elements, and for each pair behind those that are turned
__kernel void rope(mem md, T d, mem ma, T a, mem mp, T p, mem mf, T f, int factors, int n_dims, int neox, float step,
                   float freq_scale, float attn) {
    long n = d.ne[0] / 2, g = get_global_id(0), k = g % n, i1 = g / n % d.ne[1], r = g / n / d.ne[1];
    long i2 = r % d.ne[2], i3 = r / d.ne[2];
    mem x = ma + place(&a, 0, i1, i2, i3), y = md + place(&d, 0, i1, i2, i3);
    long first = neox && 2 * k < n_dims ? k : 2 * k, second = neox && 2 * k < n_dims ? k + n_dims / 2 : 2 * k + 1;
    float u = get(x, first, a.nb[0], a.type), v = get(x, second, a.nb[0], a.type);
    if (2 * k < n_dims) {
        float angle = *(__global int *) (mp + p.at + i2 * p.nb[0]);
        for (long j = 0; j < k; j++) angle *= step;
        if (factors) angle /= *(__global float *) (mf + f.at + k * f.nb[0]);
        float c = cos(angle * freq_scale) * attn, s = sin(angle * freq_scale) * attn, t = u;
        u = t * c - v * s;
        v = t * s + v * c;
    }
    put(y, first, d.nb[0], d.type, u);
    put(y, second, d.nb[0], d.type, v);
}

static float to_half(float x) {
    ushort bits;
    vstore_half_rte(x, 0, (__private half *) &bits);
    return vload_half(0, (__private half *) &bits);
}

// ggml's CPU rounds the columns that weights are multiplied with: to float16, or to q8_0. One work item for 32 elements
// of a column; the result lies dense, as float32, and after it for q4_1 the sum of each of these.
__kernel void round_columns(mem mx, mem mb, T b, int type) {
    long n = (b.ne[0] + 31) / 32, g = get_global_id(0), k = g % n * 32, c = g / n;
    long i1 = c % b.ne[1], i2 = c / b.ne[1] % b.ne[2], i3 = c / b.ne[1] / b.ne[2], end = min(b.ne[0], k + 32);
    mem x = mb + place(&b, 0, i1, i2, i3);
    __global float *y = (__global float *) mx + c * b.ne[0];
    __global float *sums = (__global float *) mx + b.ne[0] * b.ne[1] * b.ne[2] * b.ne[3];
    float most = 0, sum = 0;
    for (long i = k; i < end; i++) most = fmax(most, fabs(get(x, i, b.nb[0], b.type)));
    float id = most > 0 ? 127 / most : 0, s = to_half(most / 127);
    for (long i = k; i < end; i++) {
        float v = get(x, i, b.nb[0], b.type);
        if (type == F16) v = to_half(v);
        else if (type != F32) { v = rint(v * id); sum += v; v *= s; }
        y[i] = v;
    }
    if (type == Q4_1) sums[g] = to_half(sum * (most / 127));
}

// one work item for each element of the result; A is the type of the weights
#ifdef A
__kernel void mul_mat(mem md, T d, mem ma, T a, mem mx, T b) {
    INDEX;
    long column = (i3 * d.ne[2] + i2) * d.ne[1] + i1;
    mem w = ma + a.at + i0 * a.nb[1] + i2 / (d.ne[2] / a.ne[2]) * a.nb[2] + i3 / (d.ne[3] / a.ne[3]) * a.nb[3];
    __global const float *x = (__global float *) mx + column * b.ne[0];
    __global const float *sums = (__global float *) mx + b.ne[0] * d.ne[1] * d.ne[2] * d.ne[3];
    float sum = 0;
    if (A == F32 || A == F16) {
        for (long i = 0; i < b.ne[0]; i++) sum += get(w, i, a.nb[0], A) * x[i];
    } else {
        for (long k = 0; k < b.ne[0] / 32; k++) {
            float part = 0, all = 0;
            __global const float *v = x + 32 * k;
            if (A == Q8_0) {
                __global const char *q = w + 34 * k + 2;
                for (int i = 0; i < 32; i++) part += q[i] * v[i];
                sum += half_at(w + 34 * k) * part;
            } else {
                mem block = w + (A == Q4_0 ? 18 : 20) * k;
                __global const uchar *q = (__global uchar *) block + (A == Q4_0 ? 2 : 4);
                for (int i = 0; i < 16; i++) part += (q[i] & 15) * v[i] + (q[i] >> 4) * v[i + 16];
                if (A == Q4_0) for (int i = 0; i < 32; i++) all -= 8 * v[i];
                sum += half_at(block) * (part + all);
                if (A == Q4_1) sum += half_at(block + 2) * sums[column * (b.ne[0] / 32) + k];
            }
        }
    }
    DST sum);
}
#endif
