//! `kivi bench throughput`: many requests over a budget of bytes (the paper, section 4.3).

mod alone;
mod lengths;
mod row;
mod serve;
mod workload;

use super::{
    engine::engine_config,
    options::{ReportOptions, byte_size},
    report::{Report, progress},
};
use crate::cli::{
    cache::{self, Cache, LengthOptions},
    device::{self, DeviceOptions, Task},
    model::{self, ModelOptions},
    output, plot,
    summary::bytes,
};
use alone::Alone;
use anyhow::{Result, bail};
use clap::{Args, ValueEnum, builder::FalseyValueParser};
use indicatif::ProgressBar;
use kivi::{
    CacheConfig, DecoderBackend, Format, NamedCache,
    engine::{Admission, Engine, Lookup, Preemption},
    models::{Checkpoint, Llama},
};
use row::Row;
use serde_json::json;
use std::path::PathBuf;
use workload::{Planned, WorkloadOptions};

/// Many requests at once, with as many sequences as fit a number of bytes.
///
/// Every cache answers the same requests within the same bytes, through the engine that batches
/// them: a smaller cache has room for more sequences at once, and as long as computing is not the
/// limit it generates more tokens in a second. Answers are greedy and exactly as long as asked for;
/// some of them are computed alone as well and must be the same, token by token.
#[derive(Args, Debug)]
pub(in crate::cli) struct BenchThroughput {
    #[command(flatten)]
    model: ModelOptions,
    /// Bytes for all cached keys and values, such as 512MiB or 4GiB.
    #[arg(long, env = "KIVI_KV_MEMORY", value_delimiter = ',', value_parser = byte_size, default_value = "64MiB", value_name = "SIZE,…")]
    kv_memory: Vec<usize>,
    /// Caches by name, as kivi run takes them.
    #[arg(
        long,
        env = "KIVI_CACHES",
        value_delimiter = ',',
        default_value = "f16,kivi4,kivi2",
        value_name = "NAME,…"
    )]
    caches: Vec<NamedCache>,
    #[command(flatten)]
    layout: LengthOptions,
    #[command(flatten)]
    workload: WorkloadOptions,
    /// Draft tokens by prompt lookup.
    #[arg(long, env = "KIVI_LOOKUP", value_parser = FalseyValueParser::new())]
    lookup: bool,
    /// What a sequence must find room for before it begins: its prompt and its whole answer, so that
    /// none has to give way, or its prompt alone.
    #[arg(long, env = "KIVI_ADMISSION", value_enum, default_value = "whole-answer")]
    admission: AdmissionName,
    /// What happens to the cache of a sequence that has to give way.
    #[arg(long, env = "KIVI_PREEMPTION", value_enum, default_value = "swap")]
    preemption: PreemptionName,
    /// Draw throughput and largest batch over the bytes, as .svg or .png.
    #[arg(long, visible_alias = "svg", env = "KIVI_PLOT", value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    report: ReportOptions,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AdmissionName {
    Prompt,
    WholeAnswer,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PreemptionName {
    Swap,
    Recompute,
}

impl BenchThroughput {
    pub(in crate::cli) fn execute(mut self) -> Result<()> {
        self.plot.as_deref().map_or(Ok(()), plot::check_name)?;
        // The baseline comes first.
        self.caches.sort_by_key(|cache| *cache != NamedCache::F16);
        let checkpoint = self.model.open(!self.report.quiet())?;
        for &cache in &self.caches {
            cache::check_lengths(&self.config(cache)?, checkpoint.config())?;
        }
        let device = self.device.clone();
        device.run(Benchmark { options: self, checkpoint })
    }

    fn config(&self, cache: NamedCache) -> Result<CacheConfig> {
        let rollback = self.lookup().map_or(0, |lookup| lookup.draft_tokens);
        engine_config(cache, &self.layout, rollback)
    }

    fn lookup(&self) -> Option<Lookup> {
        self.lookup.then(Lookup::default)
    }

    fn admission(&self) -> Admission {
        match self.admission {
            AdmissionName::Prompt => Admission::Prompt,
            AdmissionName::WholeAnswer => Admission::WholeAnswer,
        }
    }

    fn preemption(&self) -> Preemption {
        match self.preemption {
            PreemptionName::Swap => Preemption::Swap,
            PreemptionName::Recompute => Preemption::Recompute,
        }
    }
}

struct Benchmark {
    options: BenchThroughput,
    checkpoint: Checkpoint,
}

impl Task for Benchmark {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint } = self;
        let model = checkpoint.config();
        let tokenizer = model::tokenizer(&checkpoint)?;
        let forbidden = model::stop_tokens(&checkpoint, &tokenizer);
        let (context, vocabulary) = (model.context_length, model.vocab_size);
        let requests = options.workload.plan(context, vocabulary, &tokenizer, &forbidden)?;
        let caches = options
            .caches
            .iter()
            .map(|&named| Ok((named.to_string(), Cache::uniform(options.config(named)?, model))));
        let caches = caches.collect::<Result<Vec<_>>>()?;
        let (name, isa) = (backend.capabilities().name, options.device.isa()?);
        let llama = options.model.load(backend, &checkpoint)?;
        let report = Report::new(
            options.report.json.clone(),
            json!({
                "backend": name,
                "isa": isa,
                "threads": rayon::current_num_threads(),
                "model": options.model.model,
                "architecture": model.architecture.name(),
                "layers": model.layers,
                "query_heads": model.query_heads,
                "kv_heads": model.kv_heads,
                "head_dim": model.head_dim,
                "workload": options.workload.describe(),
                "lookup": options.lookup,
                "admission": name_of(options.admission),
                "preemption": name_of(options.preemption),
            }),
        )?;
        let steps = options.kv_memory.len() * caches.len() * requests.len();
        let bar = progress(options.report.quiet(), steps);
        let run =
            Run { llama: &llama, options: &options, caches, requests, forbidden, bar, report };
        run.describe(&checkpoint);
        run.execute()
    }
}

/// An option's value as it is written.
fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

struct Run<'m, B: DecoderBackend> {
    llama: &'m Llama<B>,
    options: &'m BenchThroughput,
    caches: Vec<(String, Cache)>,
    requests: Vec<Planned>,
    forbidden: Vec<u32>,
    bar: ProgressBar,
    report: Report,
}

impl<B: DecoderBackend> Run<'_, B> {
    /// What is going to be measured, on standard error.
    fn describe(&self, checkpoint: &Checkpoint) {
        let quiet = self.options.report.quiet();
        let (count, input) = (self.requests.len(), row::mean_input(&self.requests));
        let output = row::mean_tokens(&self.requests) - input;
        let prefix = self.options.workload.shared_prefix;
        let longest = self.requests.iter().map(Planned::tokens).max().unwrap_or_default();
        self.bar.suspend(|| {
            if !quiet {
                eprintln!(
                    "{}; {}; {count} requests, {input:.0} tokens in and {output:.0} out on average, \
                     the longest {longest}",
                    self.options.model.model,
                    device::describe(self.llama, checkpoint),
                );
            }
            for (name, cache) in &self.caches {
                let segment = cache.config.segment_tokens().unwrap_or_default();
                let whole = cache.config.sink_length() + segment;
                if (1..whole).contains(&prefix) {
                    eprintln!(
                        "warning: nothing of a prefix of {prefix} tokens is shared in {name}, where \
                         the first segment ends after {whole}"
                    );
                }
            }
        });
    }

    fn execute(mut self) -> Result<()> {
        self.bar.set_message("requests computed alone");
        let alone = |(_, cache): &(String, Cache)| {
            Alone::compute(self.llama, cache, &self.requests, &self.forbidden)
        };
        let alone = self.caches.iter().map(alone).collect::<Result<Vec<_>>>()?;
        self.print(row::HEADING)?;
        let mut rows: Vec<Row> = Vec::new();
        for &kv_memory in &self.options.kv_memory {
            let first = rows.len();
            for ((name, cache), alone) in self.caches.iter().zip(&alone) {
                self.bar.set_message(format!("{name} in {}", bytes(kv_memory)));
                let mut row = Row::new(name, cache, kv_memory, &self.requests)?;
                self.measure(cache, alone, &mut row)?;
                let f16 = rows.get(first).unwrap_or(&row);
                let f16 = (f16.name == Format::F16.to_string()).then_some(f16);
                self.print(&row.line(f16))?;
                self.report.push(row.json(f16))?;
                rows.push(row);
            }
        }
        self.bar.finish_and_clear();
        let limits = row::limits(&rows);
        self.report.note("limits", json!(limits))?;
        if !self.options.report.quiet() {
            limits.iter().try_for_each(|line| output::print(&format!("{line}\n")))?;
        }
        if let Some(path) = &self.options.plot {
            row::plot(&rows, path)?;
        }
        self.report.finish()
    }

    /// Answers all requests within the row's bytes, if each of them fits.
    fn measure(&self, cache: &Cache, alone: &Alone, row: &mut Row) -> Result<()> {
        row.needed_bytes = serve::too_small(self.engine(cache, row.kv_memory)?, &self.requests)?;
        if row.needed_bytes.is_some() {
            self.bar.inc(self.requests.len() as u64);
            return Ok(());
        }
        let mut engine = self.engine(cache, row.kv_memory)?;
        let finished = || self.bar.inc(1);
        let measured = serve::serve(&mut engine, &self.requests, &self.forbidden, finished)?;
        if measured.stats.peak_bytes > row.kv_memory {
            let (peak, budget) = (measured.stats.peak_bytes, row.kv_memory);
            bail!("{} took {peak} bytes of cache, more than the {budget} it had", row.name);
        }
        alone.check(&format!("{} in {}", row.name, bytes(row.kv_memory)), &measured)?;
        row.checked_requests = alone.count();
        row.alone_rate = alone.rate;
        row.measured = Some(measured);
        Ok(())
    }

    fn engine(&self, cache: &Cache, kv_memory: usize) -> Result<Engine<B>> {
        let mut builder = Engine::builder(self.llama)
            .cache(cache.config.clone(), cache.layers.clone())
            .kv_memory(kv_memory)
            .max_running(self.requests.len())
            .admission(self.options.admission())
            .preemption(self.options.preemption());
        if let Some(lookup) = self.options.lookup() {
            builder = builder.lookup(lookup);
        }
        Ok(builder.build()?)
    }

    fn print(&self, line: &str) -> Result<()> {
        if !self.options.report.quiet() {
            self.bar.suspend(|| output::print(&format!("{line}\n")))?;
        }
        Ok(())
    }
}
