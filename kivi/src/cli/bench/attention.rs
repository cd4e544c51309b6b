//! `kivi bench attention`.

use super::{
    layers::{Layers, TOLERANCE},
    options::{CommonOptions, Formats, Heads, byte_size, count, seconds},
    reading::{LastLevelCache, Reading},
    report::{Percentiles, Report, progress},
    shape::{Bytes, Shape},
};
use crate::cli::{
    device::{DeviceOptions, Task},
    output,
    summary::bytes,
};
use anyhow::{Result, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use kivi::DecoderBackend;
use serde_json::{Value, json};
use std::{
    hint::black_box,
    time::{Duration, Instant},
};

/// Attention over a filled cache, beside the speed of reading as many bytes.
///
/// Each row of the table is one step of generation, attention only: the median over repeated calls
/// that go round several layers, together at least four times the last-level cache, so that the
/// cache comes from memory as it does in a model. Between the calls the same threads read as many
/// plain bytes; "share" is how close attention comes to that. Before it is timed, the answer is
/// compared with attention in f64.
#[derive(Args, Debug)]
pub(in crate::cli) struct BenchAttention {
    /// Tokens in the cache [default: 4096,32768].
    #[arg(long, env = "KIVI_TOKENS", value_delimiter = ',', value_parser = count::<1, 16_777_216>, value_name = "N,…")]
    tokens: Vec<usize>,
    /// Query heads / kv heads [default: 32/32,32/8,9/3,71/1].
    #[arg(long, env = "KIVI_HEADS", value_delimiter = ',', value_name = "Q/KV,…")]
    heads: Vec<Heads>,
    /// Channels of a head [default: 128].
    #[arg(long, env = "KIVI_HEAD_DIM", value_delimiter = ',', value_parser = count::<1, 4096>, value_name = "N,…")]
    head_dim: Vec<usize>,
    /// Cache formats, KEYS:VALUES where they differ; types as for kivi run.
    #[arg(
        long,
        env = "KIVI_FORMAT",
        value_delimiter = ',',
        default_value = "f16,kivi2,kivi4:kivi2,kivi4,kivi8",
        value_name = "TYPE,…"
    )]
    format: Vec<Formats>,
    /// Sequences that advance together [default: 1].
    #[arg(long, env = "KIVI_BATCH", value_delimiter = ',', value_parser = count::<1, 4096>, value_name = "N,…")]
    batch: Vec<usize>,
    /// The whole grid instead of a few minutes' worth: for each of the lists above that is not given,
    /// tokens 1024,4096,32768,131072, head dimensions 64,128,256, batches 1,8.
    #[arg(long, env = "KIVI_ALL", value_parser = FalseyValueParser::new())]
    all: bool,
    /// New tokens of each sequence in the step.
    #[arg(long, env = "KIVI_QUERIES", value_parser = count::<1, 4096>, default_value_t = 1, value_name = "N")]
    queries: usize,
    /// Time of a row's calls, filling and checking not counted.
    #[arg(long, env = "KIVI_SECONDS", value_parser = seconds, allow_negative_numbers = true, default_value_t = 0.5, value_name = "S")]
    seconds: f64,
    /// Make exactly N calls per row instead.
    #[arg(long, env = "KIVI_REPEATS", value_parser = count::<1, 1_000_000>, value_name = "N")]
    repeats: Option<usize>,
    /// Rows take fewer layers where this is too little for enough of them, and are skipped where it is
    /// too little for one.
    #[arg(long, env = "KIVI_MEMORY_LIMIT", value_parser = byte_size, default_value = "4GiB", value_name = "BYTES")]
    memory_limit: usize,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    common: CommonOptions,
}

/// Rotation over the layers reads this many times the last-level cache.
const CACHE_SIZES: usize = 4;

/// Calls of one kind that are made before the other kind has its turn: so many that waking the
/// threads is a small part of it.
const TURN: Duration = Duration::from_millis(2);

/// Calls that are timed however long they take.
const MIN_CALLS: usize = 5;

impl BenchAttention {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        // What no shape can have is refused before anything is measured.
        for &formats in &self.format {
            self.common.config(formats)?;
        }
        let shapes = self.shapes();
        if let Some(shape) = shapes.iter().find(|shape| shape.tokens < self.queries) {
            bail!("{} queries do not fit {} tokens", self.queries, shape.tokens);
        }
        for shape in &shapes {
            shape.pool(&self.common.config(shape.formats)?, 1)?;
        }
        let device = self.device.clone();
        device.run(Benchmark { options: self, shapes })
    }

    /// Every combination, a baseline in f16 first.
    fn shapes(&self) -> Vec<Shape> {
        let list = |given: &Vec<usize>, few: &[usize], all: &[usize]| match () {
            () if !given.is_empty() => given.clone(),
            () if self.all => all.to_vec(),
            () => few.to_vec(),
        };
        let tokens = list(&self.tokens, &[4096, 32768], &[1024, 4096, 32768, 131_072]);
        let head_dims = list(&self.head_dim, &[128], &[64, 128, 256]);
        let batches = list(&self.batch, &[1], &[1, 8]);
        let heads = [(32, 32), (32, 8), (9, 3), (71, 1)].map(|(query, kv)| Heads { query, kv });
        let heads = if self.heads.is_empty() { heads.to_vec() } else { self.heads.clone() };
        let mut formats = self.format.clone();
        formats.sort_by_key(|&formats| formats != Formats::F16);
        let queries = self.queries;
        let mut shapes = Vec::new();
        for &tokens in &tokens {
            for &heads in &heads {
                for &head_dim in &head_dims {
                    for &batch in &batches {
                        shapes.extend(formats.iter().map(|&formats| Shape {
                            tokens,
                            heads,
                            head_dim,
                            batch,
                            queries,
                            formats,
                        }));
                    }
                }
            }
        }
        shapes
    }
}

struct Benchmark {
    options: BenchAttention,
    shapes: Vec<Shape>,
}

impl Task for Benchmark {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, shapes } = self;
        let threads = rayon::current_num_threads();
        let cache = LastLevelCache::of_system(threads);
        let (isa, device) = (options.device.isa()?, backend.capabilities().device);
        let mut report = Report::new(
            options.common.report.json.clone(),
            json!({
                "backend": backend.capabilities().name,
                "isa": isa,
                "threads": threads,
                "last_level_cache_bytes": cache.bytes,
                "last_level_cache_known": cache.known,
                "memory_limit": options.memory_limit,
                "tolerance": TOLERANCE,
            }),
        )?;
        let quiet = options.common.quiet();
        let bar = progress(quiet, shapes.len());
        let print = |line: &str| if quiet { Ok(()) } else { bar.suspend(|| output::print(line)) };
        print(&format!(
            "{}: {device}; last-level cache: {}{}; queries: {}\n{HEADING}\n",
            backend.capabilities().name,
            bytes(cache.bytes),
            if cache.known { "" } else { " (assumed)" },
            options.queries,
        ))?;
        let mut baseline = None;
        for shape in shapes {
            bar.set_message(label(&shape));
            let config = options.common.config(shape.formats)?;
            let size = shape.bytes(&config)?;
            let wanted = size.layers_for(cache.bytes.saturating_mul(CACHE_SIZES));
            let count = size.layers_within(options.memory_limit, wanted);
            let needed = size.needed(count);
            let mut row = json!({
                "tokens": shape.tokens,
                "query_heads": shape.heads.query,
                "kv_heads": shape.heads.kv,
                "head_dim": shape.head_dim,
                "format": shape.formats.to_string(),
                "batch": shape.batch,
                "queries": shape.queries,
                "group_size": config.group_size(),
                "residual_length": config.residual_length(),
                "sink_length": config.sink_length(),
                "bytes_read": size.read,
                "isa": isa,
                "threads": threads,
                "skipped": needed > options.memory_limit,
                "needed_bytes": needed,
            });
            if needed > options.memory_limit {
                let (needed, limit) = (bytes(needed), bytes(options.memory_limit));
                let label = label(&shape);
                print(&format!("{label}  skipped: needs {needed}, the limit is {limit}\n"))?;
            } else {
                let result = Measured::of(&backend, shape, &config, (size, count), &options)?;
                if shape.formats == Formats::F16 {
                    baseline = Some((shape, result.attention.median));
                }
                // The shape of the baseline, apart from the format.
                let same = |(other, time): (Shape, f64)| {
                    (Shape { formats: shape.formats, ..other } == shape).then_some(time)
                };
                let ratio = baseline.and_then(same).map(|time| time / result.attention.median);
                print(&result.line(&shape, size.read, ratio))?;
                if count < wanted {
                    let (read, limit) = (bytes(count * size.read), bytes(options.memory_limit));
                    print(&format!(
                        "{:>8}over {read}, less than {CACHE_SIZES} last-level caches, as the \
                         memory limit is {limit}\n",
                        ""
                    ))?;
                }
                result.describe(&mut row, size.read, ratio);
            }
            report.push(row)?;
            bar.inc(1);
        }
        bar.finish_and_clear();
        report.finish()
    }
}

/// Times in seconds.
struct Measured {
    attention: Percentiles,
    reading: Percentiles,
    calls: usize,
    layers: usize,
    error: f64,
}

impl Measured {
    fn of<B: DecoderBackend>(
        backend: &B,
        shape: Shape,
        config: &kivi::CacheConfig,
        (size, count): (Bytes, usize),
        options: &BenchAttention,
    ) -> Result<Self> {
        let layers = Layers::fill(backend, shape, config, size, count)?;
        let error = layers.check()?;
        if error.is_nan() || error > TOLERANCE {
            bail!(
                "wrong answer for {}: the relative error is {error:.2e}, more than {TOLERANCE:.0e}",
                label(&shape).split_whitespace().collect::<Vec<_>>().join(" ")
            );
        }
        let reading = Reading::new(count, size.read);
        let attend = |layer: usize| -> Result<f64> {
            let start = Instant::now();
            black_box(layers.attend(layer % count)?);
            Ok(start.elapsed().as_secs_f64())
        };
        let read = |piece: usize| {
            let start = Instant::now();
            black_box(reading.read(piece % count));
            start.elapsed().as_secs_f64()
        };
        // Warms up, and tells how many calls a turn takes.
        let slower = attend(0)?.min(attend(1)?).max(read(0).min(read(1)));
        let turn = ((TURN.as_secs_f64() / slower) as usize).clamp(1, count);
        let limit = Duration::from_secs_f64(options.seconds);
        let (mut attention, mut plain) = (Vec::new(), Vec::new());
        let start = Instant::now();
        let mut next = 2;
        let enough = |calls: usize| match options.repeats {
            Some(n) => calls >= n,
            None => calls >= MIN_CALLS && start.elapsed() >= limit,
        };
        while !enough(attention.len()) {
            let calls = options.repeats.map_or(turn, |n| turn.min(n - attention.len()));
            for layer in next..next + calls {
                attention.push(attend(layer)?);
            }
            plain.extend((next..next + calls).map(read));
            next += calls;
        }
        Ok(Self {
            calls: attention.len(),
            attention: Percentiles::of(attention),
            reading: Percentiles::of(plain),
            layers: count,
            error,
        })
    }

    fn describe(&self, row: &mut Value, read: usize, ratio: Option<f64>) {
        let rate = |time: f64| read as f64 / time / 1e9;
        row["milliseconds"] = json!(1e3 * self.attention.median);
        row["milliseconds_p10"] = json!(1e3 * self.attention.p10);
        row["milliseconds_p90"] = json!(1e3 * self.attention.p90);
        row["gigabytes_per_second"] = json!(rate(self.attention.median));
        row["read_gigabytes_per_second"] = json!(rate(self.reading.median));
        row["share_of_read_speed"] = json!(self.reading.median / self.attention.median);
        row["speed_relative_to_f16"] = json!(ratio);
        row["relative_error"] = json!(self.error);
        row["layers"] = json!(self.layers);
        row["calls"] = json!(self.calls);
    }

    fn line(&self, shape: &Shape, read: usize, ratio: Option<f64>) -> String {
        let Percentiles { p10, median, p90 } = self.attention;
        let ratio = ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}x"));
        format!(
            "{}  {:>9.3} {:>9.3} {:>9.3}  {:>10} {:>6.2} {:>6.2} {:>5.1}% {ratio:>7}  {:.1e}\n",
            label(shape),
            1e3 * median,
            1e3 * p10,
            1e3 * p90,
            bytes(read),
            read as f64 / median / 1e9,
            read as f64 / self.reading.median / 1e9,
            100.0 * self.reading.median / median,
            self.error,
        )
    }
}

const HEADING: &str = concat!(
    " tokens   heads  dim batch  format              ms       p10       p90",
    "        read   GB/s memory  share  vs f16  error"
);

fn label(shape: &Shape) -> String {
    let Shape { tokens, heads, head_dim, batch, formats, .. } = shape;
    format!("{tokens:>7} {heads:>7} {head_dim:>4} {batch:>5}  {formats:<11}")
}
