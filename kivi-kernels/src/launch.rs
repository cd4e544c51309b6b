//! The host side of every kernel: buffers, cubes, and errors with the kernel's name.

use crate::{
    AttendConfig, DeviceError, Shape, Store,
    error::one_line,
    kernels::splits::{self, SplitAttention},
    kernels::{append, attend, combine, copy, dequantize, probe, quantize_keys, quantize_values},
    memory::Run,
    shape::MAX_CUBES,
    step::{CodesList, WorkList},
};
use cubecl::{future::block_on, prelude::*, server::Handle};
use kivi_core::{Attention, Error, Result};
use std::{
    collections::HashSet,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Mutex,
};

/// A device, and which of its kernels are known to compile.
pub(crate) struct Device<R: Runtime> {
    pub(crate) name: &'static str,
    pub(crate) client: ComputeClient<R>,
    launched: Mutex<HashSet<u64>>,
}

/// One layer's words.
#[derive(Clone, Debug)]
pub(crate) struct Arena {
    pub(crate) handle: Handle,
    pub(crate) words: usize,
}

/// What `attend` reads and where it writes.
pub(crate) struct Attend<'a> {
    pub(crate) queries: (&'a Handle, usize),
    pub(crate) arena: &'a Arena,
    pub(crate) tables: &'a Words,
    pub(crate) views_at: usize,
    pub(crate) attention: &'a Attention,
    pub(crate) window: Option<usize>,
    pub(crate) head_group: usize,
    pub(crate) config: AttendConfig,
    pub(crate) output: &'a Handle,
    /// Partial results of codes.
    pub(crate) codes: Option<&'a Partial>,
}

/// Partial results of the codes of every sequence.
#[derive(Debug)]
pub(crate) struct Partial {
    sums: Handle,
    statistics: Handle,
    /// Places: sequences times kv heads times splits times rows.
    places: usize,
    splits: usize,
    rows: usize,
}

/// Words that were uploaded.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    handle: Handle,
    length: usize,
}

impl Words {
    fn arg<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `length` is the number of words the buffer was made from.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.length) }
    }
}

impl Arena {
    fn arg<R: Runtime>(&self) -> ArrayArg<R> {
        // SAFETY: `words` is the number of words the buffer was made with.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.words) }
    }
}

impl<R: Runtime> Device<R> {
    pub(crate) fn new(name: &'static str, client: ComputeClient<R>) -> Self {
        Self { name, client, launched: Mutex::default() }
    }

    pub(crate) fn error(&self, operation: &'static str, source: DeviceError) -> Error {
        Error::Device { backend: self.name, operation, source: source.into() }
    }

    /// Waits for the device and reports what went wrong since the last time.
    pub(crate) fn sync(&self, operation: &'static str) -> Result<()> {
        block_on(self.client.sync())
            .map_err(|error| self.error(operation, DeviceError::Failed(one_line(&error))))
    }

    /// After the first launch of a kernel in a form, waits: a kernel that does not compile would
    /// otherwise leave its output as it was, and the error would surface in another operation.
    fn launched(&self, kernel: &'static str, form: impl Hash) -> Result<()> {
        let mut hasher = DefaultHasher::new();
        (kernel, form).hash(&mut hasher);
        let known = self.launched.lock().is_ok_and(|known| known.contains(&hasher.finish()));
        if known {
            return Ok(());
        }
        block_on(self.client.sync()).map_err(|error| {
            self.error(kernel, DeviceError::Kernel { kernel, reason: one_line(&error) })
        })?;
        if let Ok(mut known) = self.launched.lock() {
            known.insert(hasher.finish());
        }
        Ok(())
    }

    /// Copies words to the device; there is always one.
    pub(crate) fn words(&self, words: &[u32]) -> Words {
        let words = if words.is_empty() { &[0] } else { words };
        let handle = self.client.create_from_slice(u32::as_bytes(words));
        Words { handle, length: words.len() }
    }

    fn floats(&self, floats: Option<&[f32]>) -> ArrayArg<R> {
        let floats = floats.unwrap_or(&[0.0]);
        let handle = self.client.create_from_slice(f32::as_bytes(floats));
        // SAFETY: the length is that of the slice the buffer was made from.
        unsafe { ArrayArg::from_raw_parts(handle, floats.len()) }
    }

    /// Whether the device keeps denormal numbers.
    pub(crate) fn keeps_denormals(&self) -> Result<bool> {
        let codes: Vec<u32> = (0..16).collect();
        let input = self.words(&codes);
        let output = self.client.create_from_slice(f32::as_bytes(&[f32::NAN; 16]));
        // SAFETY: one unit for each of the 16 elements of both arrays.
        unsafe {
            probe::denormals::launch_unchecked::<R>(
                &self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(16),
                input.arg(),
                self.floats(Some(&[2f32.powi(64), 2f32.powi(85)])),
                ArrayArg::from_raw_parts(output.clone(), 16),
            );
        }
        self.launched("denormals", ())?;
        let bytes = self.read("open", output)?;
        let found = f32::from_bytes(&bytes);
        Ok(codes.iter().zip(found).all(|(&code, &found)| found == code as f32))
    }

    /// Whether a word can be read as a pair of f16.
    pub(crate) fn reads_pairs(&self) -> Result<bool> {
        // (1, 2), (−0.5, 0.25), and the smallest denormals: 3·2⁻²⁴.
        let words = [0x4000_3C00, 0x3400_B800, 0x0002_0001];
        let output = self.client.create_from_slice(f32::as_bytes(&[f32::NAN; 3]));
        let input = self.words(&words);
        // SAFETY: one unit for each of the three elements of both arrays.
        unsafe {
            probe::pairs::launch_unchecked::<R>(
                &self.client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(4),
                input.arg(),
                ArrayArg::from_raw_parts(output.clone(), 3),
            );
        }
        self.launched("pairs", ())?;
        let bytes = self.read("probe", output)?;
        Ok(f32::from_bytes(&bytes) == [3.0, -0.25, 3.0 * 2f32.powi(-24)])
    }

    /// Keys or values as f32.
    pub(crate) fn dequantize(
        &self,
        arena: &Arena,
        shape: Shape,
        places: &[u32],
        keys: bool,
    ) -> Result<Handle> {
        let elements = places.len() / 3 * shape.kv_heads * shape.head_dim;
        let output = self.client.empty(4 * elements.max(1));
        if elements == 0 {
            return Ok(output);
        }
        let list = self.words(places);
        let dim = CubeDim::new_1d(128);
        let count = cubecl::calculate_cube_count_elemwise(&self.client, elements, dim);
        // SAFETY: a unit beyond `elements` ends at once; places lie in this arena.
        unsafe {
            dequantize::dequantize::launch_unchecked::<R>(
                &self.client,
                count,
                dim,
                arena.arg(),
                list.arg(),
                ArrayArg::from_raw_parts(output.clone(), elements),
                elements as u32,
                shape,
                keys,
            );
        }
        self.launched("dequantize", (shape, keys))?;
        Ok(output)
    }

    pub(crate) fn read(&self, operation: &'static str, handle: Handle) -> Result<Vec<u8>> {
        self.sync(operation)?;
        let bytes = self.client.read_one(handle);
        let bytes =
            bytes.map_err(|error| self.error(operation, DeviceError::Failed(one_line(&error))))?;
        Ok(bytes.to_vec())
    }

    /// Copies runs within an arena.
    pub(crate) fn copy_within(&self, arena: &Arena, runs: &[Run]) -> Result<()> {
        for runs in runs.chunks(MAX_CUBES) {
            let list = self.words(&flat(runs));
            // SAFETY: the host made the runs from ranges that were allocated in this arena.
            unsafe {
                copy::copy_within::launch_unchecked::<R>(
                    &self.client,
                    CubeCount::Static(runs.len() as u32, 1, 1),
                    CubeDim::new_1d(128),
                    arena.arg(),
                    list.arg(),
                    runs.len() as u32,
                );
            }
            self.launched("copy_within", ())?;
        }
        Ok(())
    }

    /// Copies runs from one buffer of words to another.
    pub(crate) fn copy_between(&self, from: &Arena, to: &Arena, runs: &[Run]) -> Result<()> {
        for runs in runs.chunks(MAX_CUBES) {
            let list = self.words(&flat(runs));
            // SAFETY: the host made the runs from ranges that lie in both buffers.
            unsafe {
                copy::copy_between::launch_unchecked::<R>(
                    &self.client,
                    CubeCount::Static(runs.len() as u32, 1, 1),
                    CubeDim::new_1d(128),
                    from.arg(),
                    to.arg(),
                    list.arg(),
                    runs.len() as u32,
                );
            }
            self.launched("copy_between", ())?;
        }
        Ok(())
    }

    /// Stores `rows · row_words` words of new tokens; their places begin at `first`.
    #[allow(clippy::too_many_arguments)] // one launch
    pub(crate) fn append(
        &self,
        arena: &Arena,
        rows: (&Handle, usize),
        places: &Words,
        first: usize,
        row_words: usize,
        store: Store,
        saturated: &Handle,
    ) -> Result<()> {
        let words = rows.1 * row_words;
        if words == 0 {
            return Ok(());
        }
        let dim = CubeDim::new_1d(128);
        let count = cubecl::calculate_cube_count_elemwise(&self.client, words, dim);
        // SAFETY: a unit beyond `words` ends at once; places are those of rows in this arena.
        unsafe {
            append::append::launch_unchecked::<R>(
                &self.client,
                count,
                dim,
                ArrayArg::from_raw_parts(rows.0.clone(), words * store.per_word()),
                places.arg(),
                arena.arg(),
                ArrayArg::from_raw_parts(saturated.clone(), 1),
                first as u32,
                words as u32,
                row_words,
                store,
            );
        }
        self.launched("append", (row_words, store))
    }

    /// Quantizes groups of keys.
    pub(crate) fn quantize_keys(&self, arena: &Arena, shape: Shape, items: &[u32]) -> Result<()> {
        for items in items.chunks(3 * MAX_CUBES) {
            let (list, count) = (self.words(items), items.len() / 3);
            let units = units_for(shape.head_dim);
            // SAFETY: the items name tokens and pages of this arena.
            unsafe {
                quantize_keys::quantize_keys::launch_unchecked::<R>(
                    &self.client,
                    CubeCount::Static(count as u32, shape.kv_heads as u32, 1),
                    CubeDim::new_1d(units as u32),
                    arena.arg(),
                    list.arg(),
                    count as u32,
                    shape,
                    units,
                );
            }
            self.launched("quantize_keys", shape)?;
        }
        Ok(())
    }

    /// Quantizes values.
    pub(crate) fn quantize_values(&self, arena: &Arena, shape: Shape, items: &[u32]) -> Result<()> {
        for items in items.chunks(6 * MAX_CUBES) {
            let (list, count) = (self.words(items), items.len() / 6);
            let units = units_for(shape.head_dim);
            // SAFETY: the items name tokens and pages of this arena.
            unsafe {
                quantize_values::quantize_values::launch_unchecked::<R>(
                    &self.client,
                    CubeCount::Static(count as u32, shape.kv_heads as u32, 1),
                    CubeDim::new_1d(units as u32),
                    arena.arg(),
                    list.arg(),
                    count as u32,
                    shape,
                    units,
                );
            }
            self.launched("quantize_values", shape)?;
        }
        Ok(())
    }

    /// Attention of the blocks of a work list.
    pub(crate) fn attend(&self, job: &Attend<'_>, work: &WorkList) -> Result<()> {
        let (config, shape) = (job.config, job.config.shape);
        let places = work.items * shape.kv_heads * config.queries;
        let sums = self.client.empty(4 * places * shape.head_dim);
        let statistics = self.client.empty(8 * places);
        let list = self.words(&work.words);
        let items_at = work.words.len() - 3 * work.items;
        let across = work.items.min(MAX_CUBES);
        let cubes = [across, shape.kv_heads, work.items.div_ceil(across)].map(|n| n as u32);
        let floats = |handle: &Handle, length| {
            // SAFETY: every caller below passes the length the buffer was made with.
            unsafe { ArrayArg::from_raw_parts(handle.clone(), length) }
        };
        // SAFETY: items, tables and the arena come from one step plan, and the buffers for partial
        // results have room for every item.
        unsafe {
            attend::attend::launch_unchecked::<R>(
                &self.client,
                CubeCount::Static(cubes[0], cubes[1], cubes[2]),
                CubeDim::new_1d(config.units as u32),
                floats(job.queries.0, job.queries.1),
                job.arena.arg(),
                job.tables.arg(),
                list.arg(),
                self.floats(job.attention.alibi_slopes.as_deref()),
                floats(&sums, places * shape.head_dim),
                floats(&statistics, 2 * places),
                work.items as u32,
                items_at as u32,
                job.views_at as u32,
                job.head_group as u32,
                job.attention.scale,
                job.attention.softcap.unwrap_or(1.0),
                job.window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX),
                config,
            );
        }
        self.launched("attend", config)?;
        let join = combine::CombineConfig {
            head_dim: shape.head_dim,
            kv_heads: shape.kv_heads,
            units: units_for(shape.head_dim),
        };
        let more = job.codes;
        let more_places = more.map_or(1, |partial| partial.places);
        let (more_sums, more_statistics) = match more {
            Some(partial) => (&partial.sums, &partial.statistics),
            // Never read.
            None => (&sums, &statistics),
        };
        // SAFETY: as above; the output has a place for every row and query head.
        unsafe {
            combine::combine::launch_unchecked::<R>(
                &self.client,
                CubeCount::Static(work.blocks as u32, shape.kv_heads as u32, 1),
                CubeDim::new_1d(join.units as u32),
                list.arg(),
                job.tables.arg(),
                floats(&sums, places * shape.head_dim),
                floats(&statistics, 2 * places),
                floats(more_sums, more_places * shape.head_dim),
                floats(more_statistics, 2 * more_places),
                self.floats(job.attention.sink_logits.as_deref()),
                floats(job.output, job.queries.1),
                work.blocks as u32,
                config.queries as u32,
                more.map_or(0, |partial| partial.splits) as u32,
                more.map_or(0, |partial| partial.rows) as u32,
                u32::from(job.attention.sink_logits.is_some()),
                job.head_group as u32,
                join,
            );
        }
        self.launched("combine", join)
    }
}

impl<R: Runtime> Device<R> {
    /// Attention over the codes of one row of each sequence.
    pub(crate) fn attend_codes(
        &self,
        list: &CodesList,
        (queries, arena): (&Handle, &Arena),
        attention: &Attention,
        sequences: usize,
    ) -> Result<Partial> {
        let config = list.config;
        let places = sequences * config.kv_heads * list.splits * list.rows;
        let sums = self.client.empty(4 * places * config.head_dim);
        let statistics = self.client.empty(8 * places);
        let job = SplitAttention {
            sequences,
            rows: list.rows,
            splits: list.splits,
            max_pages: list.max_pages,
            scale: attention.scale,
            cap: attention.softcap.unwrap_or(1.0),
            queries: queries.clone(),
            arena: arena.handle.clone(),
            arena_words: arena.words,
            pages: self.words(&list.pages).handle,
            tokens: self.words(&list.tokens).handle,
            visible: self.words(&list.visible).handle,
            sums: sums.clone(),
            extremes: statistics.clone(),
        };
        // SAFETY: the list was made for as many sequences as there are rows of queries, and its pages
        // lie in this arena, aligned to 4 words.
        unsafe { splits::attend(&self.client, &job, config) }
            .map_err(|what| Error::Unsupported { backend: self.name, what: what.into() })?;
        self.launched("attend_split", config)?;
        Ok(Partial { sums, statistics, places, splits: list.splits, rows: list.rows })
    }
}

fn flat(runs: &[Run]) -> Vec<u32> {
    runs.as_flattened().iter().map(|&word| word as u32).collect()
}

/// Units of a cube that works on channels.
fn units_for(head_dim: usize) -> usize {
    head_dim.next_power_of_two().clamp(32, 128)
}
