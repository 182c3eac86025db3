// The selective scan and its adjoint on one CPU core: h_t = exp(d_t A) h_{t-1} + d_t x_t B_t, y_t = C_t · h_t, h_0 = 0.
// x, d, y are (B, T, I); A is (N, I); B and C are (B, T, N). W channels are worked on side by side (I is a multiple of
// W), with their states in the nearest cache. Going back, the states of CHUNK tokens at a time are computed once more
// from `starts` (B, ⌈T / CHUNK⌉, N, I), the states before each chunk, which going forward has kept.

#include <math.h>
#include <string.h>

#ifdef DOUBLE
typedef double real;
#define EXP exp
#else
typedef float real;
#define EXP expf
#endif

enum { W = 32, CHUNK = 16, MAX_N = 64 };

int scan_limits(int which) { return which == 0 ? W : which == 1 ? CHUNK : MAX_N; }

void scan_forward(long B, long T, long I, long N, const real *x, const real *d, const real *A, const real *Bs,
                  const real *Cs, real *y, real *starts) {
    long chunks = (T + CHUNK - 1) / CHUNK;
    for (long b = 0; b < B; b++)
        for (long i = 0; i < I; i += W) {
            real h[MAX_N * W];
            memset(h, 0, sizeof h);
            for (long t = 0; t < T; t++) {
                if (t % CHUNK == 0)
                    for (long n = 0; n < N; n++)
                        memcpy(starts + ((b * chunks + t / CHUNK) * N + n) * I + i, h + n * W, sizeof(real) * W);
                long at = (b * T + t) * I + i;
                const real *Bt = Bs + (b * T + t) * N, *Ct = Cs + (b * T + t) * N;
                real sum[W] = {0}, dx[W];
                for (int w = 0; w < W; w++) dx[w] = d[at + w] * x[at + w];
                for (long n = 0; n < N; n++) {
                    const real *An = A + n * I + i;
                    real *hn = h + n * W;
                    for (int w = 0; w < W; w++) {
                        hn[w] = EXP(d[at + w] * An[w]) * hn[w] + dx[w] * Bt[n];
                        sum[w] += Ct[n] * hn[w];
                    }
                }
                memcpy(y + at, sum, sizeof sum);
            }
        }
}

// From gy, the gradient of y, those of x, d, A, B and C. The last three are added to: they begin as zeros.
void scan_backward(long B, long T, long I, long N, const real *x, const real *d, const real *A, const real *Bs,
                   const real *Cs, const real *starts, const real *gy, real *gx, real *gd, real *gA, real *gB,
                   real *gC) {
    static real h[(CHUNK + 1) * MAX_N * W], decay[CHUNK * MAX_N * W];
    long chunks = (T + CHUNK - 1) / CHUNK;
    for (long b = 0; b < B; b++)
        for (long i = 0; i < I; i += W) {
            real carried[MAX_N * W];  // the adjoint of a state, from all that comes after it
            memset(carried, 0, sizeof carried);
            for (long chunk = chunks - 1; chunk >= 0; chunk--) {
                long first = chunk * CHUNK, count = T - first < CHUNK ? T - first : CHUNK;
                for (long n = 0; n < N; n++)
                    memcpy(h + n * W, starts + ((b * chunks + chunk) * N + n) * I + i, sizeof(real) * W);
                for (long k = 0; k < count; k++) {
                    long at = (b * T + first + k) * I + i;
                    const real *Bt = Bs + (b * T + first + k) * N;
                    real dx[W];
                    for (int w = 0; w < W; w++) dx[w] = d[at + w] * x[at + w];
                    for (long n = 0; n < N; n++) {
                        const real *An = A + n * I + i, *before = h + (k * N + n) * W;
                        real *now = h + ((k + 1) * N + n) * W, *a = decay + (k * N + n) * W;
                        for (int w = 0; w < W; w++) {
                            a[w] = EXP(d[at + w] * An[w]);
                            now[w] = a[w] * before[w] + dx[w] * Bt[n];
                        }
                    }
                }
                for (long k = count - 1; k >= 0; k--) {
                    long token = b * T + first + k, at = token * I + i;
                    real gdx[W] = {0}, gdecay[W] = {0}, dx[W];
                    for (int w = 0; w < W; w++) dx[w] = d[at + w] * x[at + w];
                    for (long n = 0; n < N; n++) {
                        const real *An = A + n * I + i, *a = decay + (k * N + n) * W;
                        const real *before = h + (k * N + n) * W, *now = h + ((k + 1) * N + n) * W;
                        real *gAn = gA + n * I + i, *c = carried + n * W;
                        real Bn = Bs[token * N + n], Cn = Cs[token * N + n], sumB = 0, sumC = 0;
                        for (int w = 0; w < W; w++) {
                            real g = c[w] + gy[at + w] * Cn;
                            sumB += g * dx[w];
                            sumC += gy[at + w] * now[w];
                            gdx[w] += g * Bn;
                            c[w] = g * a[w];
                            real q = c[w] * before[w];
                            gAn[w] += q * d[at + w];
                            gdecay[w] += q * An[w];
                        }
                        gB[token * N + n] += sumB;
                        gC[token * N + n] += sumC;
                    }
                    for (int w = 0; w < W; w++) {
                        gx[at + w] = gdx[w] * d[at + w];
                        gd[at + w] = gdx[w] * x[at + w] + gdecay[w];
                    }
                }
            }
        }
}
