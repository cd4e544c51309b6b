//! Running a case on a backend.

use super::{Case, Cut, SequenceData};
use kivi_core::{
    CacheBackend, CacheState, CanonicalLayer, KeyValue, Result, SequenceId, StepPlan, StepRequest,
    memory::{self, MeasuredBytes, MemoryUsage},
};

/// What a backend made of a case.
#[derive(Clone, Debug)]
pub struct RunResult {
    /// Per sequence, `[tokens, query_heads, head_dim]`.
    pub outputs: Vec<Vec<f32>>,
    /// Per sequence, its one layer at the end.
    pub layers: Vec<CanonicalLayer>,
    /// The backend's bytes at the end.
    pub measured: MeasuredBytes,
    /// The memory model's.
    pub predicted: MemoryUsage,
}

/// Runs a case, cut as `cut` says.
///
/// # Errors
/// What the backend or the state machine reports.
pub fn run<B: CacheBackend>(
    backend: &B,
    case: &Case,
    data: &[SequenceData],
    cut: Cut,
) -> Result<RunResult> {
    let spec = case.pool()?;
    let mut cache = backend.create_cache(&spec)?;
    let mut state = CacheState::new(spec);
    let mut sequences = Vec::new();
    for sequence in &case.sequences {
        let id = state.create_sequence()?;
        state.begin_prompt(id, sequence.prompt)?;
        sequences.push(Progress { id, done: 0, outputs: Vec::new() });
    }
    let mut driver = Driver { backend, case, data, state: &mut state, cache: &mut cache };
    if cut.batched {
        while driver.step(&mut sequences.iter_mut().enumerate().collect::<Vec<_>>(), cut)? {}
    } else {
        for (index, progress) in sequences.iter_mut().enumerate() {
            while driver.step(&mut [(index, &mut *progress)], cut)? {}
        }
    }

    let mut result = RunResult {
        outputs: Vec::new(),
        layers: Vec::new(),
        measured: backend.measure(&cache),
        predicted: MemoryUsage::default(),
    };
    for progress in sequences {
        let layout = state.layout(progress.id)?;
        result.predicted += memory::of_sequence(state.spec(), state.policy().as_ref(), &layout);
        if layout.tables.iter().flatten().all(|&page| page != kivi_core::PageId::DROPPED) {
            result.layers.push(backend.export(&cache, 0, &layout)?);
        }
        result.outputs.push(progress.outputs);
    }
    Ok(result)
}

struct Progress {
    id: SequenceId,
    done: usize,
    outputs: Vec<f32>,
}

struct Driver<'a, B: CacheBackend> {
    backend: &'a B,
    case: &'a Case,
    data: &'a [SequenceData],
    state: &'a mut CacheState,
    cache: &'a mut B::Cache,
}

impl<B: CacheBackend> Driver<'_, B> {
    /// One step of all unfinished sequences; says whether there was anything to do.
    fn step(&mut self, sequences: &mut [(usize, &mut Progress)], cut: Cut) -> Result<bool> {
        let mut requests = Vec::new();
        for (index, progress) in sequences.iter() {
            let sequence = self.case.sequences[*index];
            let prompt = sequence.prompt.saturating_sub(progress.done);
            let left = sequence.prompt + sequence.generated - progress.done;
            let tokens = match prompt {
                0 => left.min(cut.generated),
                prompt => prompt.min(cut.prompt),
            };
            if tokens > 0 {
                requests.push((*index, StepRequest { sequence: progress.id, tokens }));
            }
        }
        if requests.is_empty() {
            return Ok(false);
        }
        let mut plan = StepPlan::default();
        let plain: Vec<_> = requests.iter().map(|(_, request)| *request).collect();
        self.state.plan(&plain, &mut plan)?;

        let width = self.case.kv_heads * self.case.head_dim;
        let query_width = width * self.case.head_group;
        let mut inputs = (Vec::new(), KeyValue::new(Vec::new(), Vec::new()));
        for ((index, _), sequence) in requests.iter().zip(&plan.sequences) {
            let (data, at) = (&self.data[*index], sequence.positions());
            inputs.0.extend_from_slice(&data.queries[at.start * query_width..at.end * query_width]);
            inputs.1.keys.extend_from_slice(&data.keys[at.start * width..at.end * width]);
            inputs.1.values.extend_from_slice(&data.values[at.start * width..at.end * width]);
        }
        let backend = self.backend;
        let queries = backend.upload(plan.rows, query_width, &inputs.0)?;
        let keys = backend.upload(plan.rows, width, &inputs.1.keys)?;
        let values = backend.upload(plan.rows, width, &inputs.1.values)?;
        backend.begin_step(self.cache, &plan)?;
        backend.append(self.cache, 0, &plan, &keys, &values)?;
        backend.quantize(self.cache, 0, &plan)?;
        let attention = self.case.attention();
        let output = backend.attend(self.cache, 0, &plan, &attention, &queries)?;
        backend.release(self.cache, 0, &plan)?;
        // Not a number where the backend writes nothing.
        let mut rows = vec![f32::NAN; plan.rows * query_width];
        backend.read(&output, &mut rows)?;
        for (_, progress) in sequences.iter_mut() {
            if let Some(plan) = plan.sequences.iter().find(|s| s.sequence == progress.id) {
                let range = plan.rows.start * query_width..plan.rows.end * query_width;
                progress.outputs.extend_from_slice(&rows[range]);
                progress.done = plan.tokens_after();
            }
        }
        Ok(true)
    }
}
