//! The grid of cases.

use super::DataKind;
use kivi_core::{
    Attention, Bits, CacheConfig, Format, KeyBias, LayerSpec, PoolSpec, Result, Rope, RopeStyle,
    StoreDtype, ValueResidual,
};
use std::sync::Arc;

/// How many tokens a sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// Prompt tokens.
    pub prompt: usize,
    /// Generated tokens.
    pub generated: usize,
}

/// How the backend under test cuts the work into steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Prompt tokens of one step.
    pub prompt: usize,
    /// Generated tokens of one step.
    pub generated: usize,
    /// All sequences advance in the same steps instead of one after the other.
    pub batched: bool,
}

impl Cut {
    /// The prompt in one step, then token by token.
    pub const PLAIN: Self = Self { prompt: usize::MAX, generated: 1, batched: false };
}

/// One case of the suite.
#[derive(Clone, Debug)]
pub struct Case {
    /// Cache configuration.
    pub config: CacheConfig,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Query heads per kv head.
    pub head_group: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Sliding window.
    pub window: Option<usize>,
    /// Logit soft-cap.
    pub softcap: Option<f32>,
    /// Whether there are learned sink logits and ALiBi slopes.
    pub extras: bool,
    /// Norm of a key bias that the cached keys do not hold.
    pub key_bias: Option<f32>,
    /// The sequences.
    pub sequences: Vec<Sequence>,
    /// How the backend cuts the work.
    pub cut: Cut,
    /// What keys, values and queries look like.
    pub data: DataKind,
    /// Seed of the data; in the suite also the number of the case.
    pub seed: u64,
}

impl Case {
    /// A case with the given configuration and otherwise small, plain values.
    pub fn new(config: CacheConfig) -> Self {
        Self {
            config,
            kv_heads: 1,
            head_group: 1,
            head_dim: 64,
            window: None,
            softcap: None,
            extras: false,
            key_bias: None,
            sequences: vec![Sequence { prompt: 1, generated: 0 }],
            cut: Cut { batched: true, ..Cut::PLAIN },
            data: DataKind::Normal,
            seed: 0,
        }
    }

    /// The pool: one layer, room for every sequence.
    ///
    /// # Errors
    /// When the case is not valid.
    pub fn pool(&self) -> Result<PoolSpec> {
        let mut layer = LayerSpec::new(&self.config, self.kv_heads, self.head_dim);
        layer.window = self.window;
        let longest = self.sequences.iter().map(|s| s.prompt + s.generated).max().unwrap_or(0);
        // One page more for the boundary that a sink length shifts.
        let room = longest + self.config.page_tokens();
        PoolSpec::for_context(self.config.clone(), vec![layer], self.sequences.len(), room)
    }

    /// The attention parameters.
    pub fn attention(&self) -> Attention {
        let heads = self.kv_heads * self.head_group;
        let mut attention = Attention::new(heads, 1.0 / (self.head_dim as f32).sqrt());
        attention.softcap = self.softcap;
        if self.extras {
            attention.sink_logits = Some((0..heads).map(|h| 0.5 - h as f32 / 4.0).collect());
            attention.alibi_slopes = Some((0..heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect());
        }
        attention.key_bias = self.key_bias.and_then(|norm| self.bias(norm)).map(Arc::new);
        attention
    }

    /// A bias of the given norm in every kv head, all channels alike, three quarters of them rotated.
    fn bias(&self, norm: f32) -> Option<KeyBias> {
        let (width, pairs) = (self.head_dim, (self.head_dim * 3 / 8).max(1));
        let frequencies = (0..pairs).map(|i| 0.1f32.powf(4.0 * i as f32 / pairs as f32)).collect();
        let rope = Rope { style: RopeStyle::Halves, frequencies, attention_factor: 1.0 };
        let element = |index: usize| {
            let sign = if index.is_multiple_of(3) { -1.0 } else { 1.0 };
            sign * norm / (width as f32).sqrt()
        };
        KeyBias::new(&rope, width, (0..self.kv_heads * width).map(element).collect()).ok()
    }
}

fn config(key: Format, value: Format, group: usize, residual: usize) -> CacheConfig {
    let builder = CacheConfig::builder().key(key).value(value);
    builder.group_size(group).residual_length(residual).build().unwrap_or_else(|error| {
        panic!("a case of the suite is not valid: {error}");
    })
}

/// 2-bit values, and 2-bit keys with the given share of promoted channels.
fn promoted(
    share: f64,
    store: StoreDtype,
    group: usize,
    residual: usize,
    sinks: usize,
) -> CacheConfig {
    let format = Format::new(Some(Bits::Two), store);
    let config = format.promote(share).and_then(|key| {
        let builder = CacheConfig::builder().key(key).value(format).sink_length(sinks);
        builder.group_size(group).residual_length(residual).build()
    });
    config.unwrap_or_else(|error| panic!("a case of the suite is not valid: {error}"))
}

fn formats(store: StoreDtype) -> Vec<Format> {
    let bits = Bits::ALL.into_iter().map(Some).chain([None]);
    bits.map(|bits| Format::new(bits, store)).collect()
}

/// Prompt lengths around every boundary: `T ∈ {1, 2, G−1, G, R−1, R, R+1, 2R−1, 2R, 2R+1, 3R+G}`.
fn lengths(g: usize, r: usize) -> [usize; 11] {
    [1, 2, g - 1, g, r - 1, r, r + 1, 2 * r - 1, 2 * r, 2 * r + 1, 3 * r + g]
}

/// A few hundred cases: every value of every axis, and the pairs that matter.
pub fn basic_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |mut case: Case| {
        case.seed = cases.len() as u64;
        cases.push(case);
    };
    let (g, r) = (32, 64);

    // Every prompt length, with enough generated tokens to cross two block boundaries.
    for (i, prompt) in lengths(g, r).into_iter().enumerate() {
        for generated in [0, 1, 2 * r] {
            let mut case = Case::new(config(Format::KIVI2, Format::KIVI2, g, r));
            case.sequences = vec![Sequence { prompt, generated }];
            case.cut.prompt = [usize::MAX, 1, g - 1, g, r - 1, r, r + 1][i % 7];
            case.cut.generated = [1, 2, 3, 8][i % 4];
            (case.kv_heads, case.head_group) = (2, 2);
            push(case);
        }
    }
    // Every pair of formats over every store type.
    for store in [StoreDtype::F16, StoreDtype::Bf16, StoreDtype::F32] {
        for key in formats(store) {
            for value in formats(store) {
                let mut case = Case::new(config(key, value, g, r));
                case.sequences = vec![Sequence { prompt: 2 * r + 1, generated: r + 3 }];
                case.cut.generated = 5;
                push(case);
            }
        }
    }
    // Every head group and head_dim, every group size.
    for (i, head_group) in [1, 3, 4, 8, 71].into_iter().enumerate() {
        for (j, head_dim) in [64, 72, 80, 96, 112, 128, 192, 256, 20].into_iter().enumerate() {
            let group = [16, 32, 64, 128][(i + j) % 4];
            let mut case = Case::new(config(Format::KIVI2, Format::KIVI4, group, 128));
            (case.head_group, case.head_dim) = (head_group, head_dim);
            case.sequences = vec![Sequence { prompt: 131, generated: 3 }];
            push(case);
        }
    }
    // Every kind of data at every width.
    for data in DataKind::ALL {
        for bits in Bits::ALL {
            let format = Format::new(Some(bits), StoreDtype::F16);
            let mut case = Case::new(config(format, format, g, r));
            case.data = data;
            case.sequences = vec![Sequence { prompt: 3 * r + g, generated: 5 }];
            push(case);
        }
    }
    // Ragged batches, sinks, rollback copies, block mode, segments, windows, extras.
    for sinks in [0, 4, 32, 33] {
        for mode in [ValueResidual::Window, ValueResidual::Block] {
            for segment in [None, Some(64), Some(128)] {
                let builder = CacheConfig::builder().residual_length(r).sink_length(sinks);
                let builder = builder.value_residual(mode).segment_tokens(segment);
                let config = builder.rollback_length(sinks % 5).build();
                let mut case = Case::new(config.unwrap_or_else(|error| panic!("{error}")));
                case.sequences = vec![
                    Sequence { prompt: 200, generated: 70 },
                    Sequence { prompt: 1, generated: 100 },
                    Sequence { prompt: 63, generated: 9 },
                ];
                case.cut = Cut { prompt: 50, generated: 3, batched: true };
                case.extras = sinks == 4;
                push(case);
            }
        }
    }
    for window in [1, 50, 64, 65, 100, 1000] {
        for sinks in [0, 4] {
            let builder = CacheConfig::builder().residual_length(r).sink_length(sinks);
            let mut case = Case::new(builder.build().unwrap_or_else(|error| panic!("{error}")));
            case.window = Some(window);
            case.sequences = vec![Sequence { prompt: 150, generated: 150 }];
            case.softcap = (window == 100).then_some(2.0);
            push(case);
        }
    }
    // Promoted key channels: shares, dimensions whose masks end inside a word, group sizes, sinks.
    for (i, share) in [0.25, 0.125].into_iter().enumerate() {
        for (j, head_dim) in [64, 128, 72, 20].into_iter().enumerate() {
            for (k, group) in [16, 32, 64, 128].into_iter().enumerate() {
                let sinks = [0, 4, 32][(i + j + k) % 3];
                let residual = group.max(r);
                let config = promoted(share, StoreDtype::F16, group, residual, sinks);
                let mut case = Case::new(config);
                case.data = [DataKind::Normal, DataKind::OutlierChannels][(i + k) % 2];
                (case.kv_heads, case.head_group) = (2, [1, 3, 4][(j + k) % 3]);
                (case.head_dim, case.extras) = (head_dim, k == 2);
                case.sequences = vec![
                    Sequence { prompt: residual + sinks + 5, generated: 7 },
                    Sequence { prompt: residual - 1, generated: 3 },
                ];
                case.cut = Cut { prompt: residual - 2, generated: 3, batched: true };
                push(case);
            }
        }
        // Every kind of data: equal ranges, scales that are stored as 0, ties.
        for data in DataKind::ALL {
            for store in [StoreDtype::F16, StoreDtype::Bf16, StoreDtype::F32] {
                let mut case = Case::new(promoted(share, store, g, r, 4));
                (case.data, case.head_group) = (data, 2);
                case.sequences = vec![Sequence { prompt: 3 * r + g, generated: 5 }];
                push(case);
            }
        }
    }
    // Key biases beside the cache: tiles after sinks, promoted channels, full keys, windows, soft-cap.
    for (i, norm) in [1.0, 600.0].into_iter().enumerate() {
        for (j, head_dim) in [64, 128, 72, 20].into_iter().enumerate() {
            let config = match (i + j) % 3 {
                0 => config(Format::KIVI2, Format::KIVI2, g, r),
                1 => promoted(0.25, StoreDtype::F16, g, r, 4),
                _ => config(Format::F16, Format::KIVI4, g, r),
            };
            let mut case = Case::new(config);
            (case.kv_heads, case.head_group, case.head_dim) = (2, [1, 3, 7][j % 3], head_dim);
            (case.key_bias, case.extras) = (Some(norm), j == 1);
            case.window = (j == 2).then_some(100);
            case.softcap = (j == 3).then_some(50.0);
            case.sequences = vec![
                Sequence { prompt: 300, generated: 2 * r + 9 },
                Sequence { prompt: 63, generated: 5 },
            ];
            case.cut = Cut { prompt: 77, generated: 3, batched: true };
            push(case);
        }
    }
    // Block boundaries while generating, a window, and every channel promoted.
    for share in [0.25, 1.0] {
        for window in [None, Some(100)] {
            let mut case = Case::new(promoted(share, StoreDtype::F16, g, r, 4));
            case.window = window;
            case.sequences = vec![Sequence { prompt: 63, generated: 2 * r + 9 }];
            case.cut.generated = 7;
            push(case);
        }
    }
    cases
}

/// The whole product of lengths, formats, heads and dimensions: 221,760 cases, days on one core.
pub fn extended_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (g, r) in [(32, 128), (64, 64), (16, 32)] {
        for prompt in lengths(g, r) {
            for generated in [0, 1, r / 2 + 3, 2 * r] {
                for store in [StoreDtype::F16, StoreDtype::Bf16, StoreDtype::F32] {
                    for key in formats(store) {
                        for value in formats(store) {
                            for head_group in [1, 3, 4, 8, 71] {
                                for head_dim in [64, 80, 96, 112, 128, 192, 256] {
                                    let mut case = Case::new(config(key, value, g, r));
                                    (case.head_group, case.head_dim) = (head_group, head_dim);
                                    case.sequences = vec![Sequence { prompt, generated }];
                                    case.cut.prompt = r - 1;
                                    case.cut.generated = 3;
                                    case.seed = cases.len() as u64;
                                    cases.push(case);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    cases
}
