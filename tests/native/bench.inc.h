static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef double timed_fn(void *context);

static double time_once(wkv6_status (*run)(const wkv6_problem *), const wkv6_problem *p) {
  const double start = now();
  if (run(p) != WKV6_OK) abort();
  return now() - start;
}

static void bench_all(void) {
  static const shape sizes[] = {{1, 512, 8, 64, 64, WKV6_F32, 1, "normal", 0}, {1, 512, 8, 64, 64, WKV6_BF16, 1, "normal", 0}, {1, 512, 32, 64, 64, WKV6_F32, 1, "normal", 0}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    problem x = make_problem(&sizes[i]);
    const double token_heads = (double)(x.p.B * x.p.T * x.p.H);
    double best[8][2][2];
    for (int round = 0; round < 20; round++) {
      int n = 0;
      for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++, n++) {
        if (!isa->runs_here()) continue;
        wkv6_use_isa(isa->name);
        for (int a = 0; a < 2; a++) {
          x.p.flags = a ? WKV6_CHUNK : WKV6_RECURRENT;
          const double f = time_once(wkv6_cpu_forward, &x.p), b = time_once(wkv6_cpu_backward, &x.p);
          if (round == 0 || f < best[n][a][0]) best[n][a][0] = f;
          if (round == 0 || b < best[n][a][1]) best[n][a][1] = b;
        }
      }
    }
    int n = 0;
    for (const wkv6_isa *isa = wkv6_isas; isa->name; isa++, n++)
      if (isa->runs_here())
        for (int a = 0; a < 2; a++)
          printf("dtype %d H%d %-8s %-9s forward %6.1f ns  backward %6.1f ns\n", sizes[i].dtype, (int)sizes[i].H, isa->name, a ? "chunk" : "recurrent", 1e9 * best[n][a][0] / token_heads,
                 1e9 * best[n][a][1] / token_heads);
    release();
  }
}
