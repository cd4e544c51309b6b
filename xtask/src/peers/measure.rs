//! Running both programs in turn.

use super::build::LlamaCpp;
use super::machine::Machine;
use super::results::{Depth, KIVI, LLAMA, Measured, Run, Shape, formats};
use crate::report::Problem;
use crate::shell::{command, kivi, output};
use std::path::Path;

/// How much is measured.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) shapes: Vec<Shape>,
    pub(super) depths: Vec<Depth>,
    pub(super) threads: usize,
    /// How often each case is measured, by one program after the other.
    pub(super) rounds: usize,
    /// Time of one attention measurement.
    pub(super) milliseconds: u64,
    /// Tokens generated for one measurement of decoding.
    pub(super) generate: u64,
    /// How often they are generated in a round, as filling the cache takes much longer.
    pub(super) repeats: u64,
}

impl Plan {
    pub(super) fn new(quick: bool, threads: usize, rounds: Option<usize>) -> Self {
        let tokens: &[u64] = if quick { &[1024, 4096] } else { &[1024, 4096, 32768] };
        let heads: &[(u64, u64)] = if quick { &[(32, 8)] } else { &[(32, 32), (32, 8), (9, 3)] };
        let head_dims: &[u64] = if quick { &[128] } else { &[64, 128] };
        let depths: &[u64] = if quick { &[0, 1024] } else { &[0, 1024, 4096] };
        let mut shapes = Vec::new();
        for &(query_heads, kv_heads) in heads {
            for &head_dim in head_dims {
                let of_length = |&tokens| Shape { tokens, query_heads, kv_heads, head_dim };
                shapes.extend(tokens.iter().map(of_length));
            }
        }
        Self {
            shapes,
            depths: depths.iter().copied().map(Depth).collect(),
            threads,
            rounds: rounds.unwrap_or(if quick { 1 } else { 3 }),
            milliseconds: if quick { 300 } else { 1000 },
            generate: if quick { 16 } else { 32 },
            repeats: if quick { 1 } else { 3 },
        }
    }

    /// Whether llama.cpp goes first: they take turns, so that neither always runs on the machine
    /// that the other has warmed.
    fn llama_cpp_first(round: usize) -> bool {
        round.is_multiple_of(2)
    }

    /// Arguments of `tools/peers/attention.cpp` for one shape.
    pub(super) fn llama_attention(&self, shape: &Shape, machine: &Machine) -> Vec<String> {
        let mut arguments = shape_arguments(shape);
        arguments.extend(pair("--cache", &list(LLAMA)));
        arguments.extend(pair("--threads", &self.threads));
        arguments.extend(pair("--milliseconds", &self.milliseconds));
        arguments.extend(pair("--working-set", &(4 * machine.last_level_cache)));
        arguments
    }

    /// Arguments of kivi for one shape.
    pub(super) fn kivi_attention(&self, shape: &Shape) -> Vec<String> {
        let mut arguments = vec!["bench".to_owned(), "attention".to_owned()];
        arguments.extend(shape_arguments(shape));
        arguments.extend(pair("--format", &list(KIVI)));
        arguments.extend(pair("--batch", &1));
        arguments.extend(pair("--threads", &self.threads));
        // A working set of several large last-level caches, of which a server's have hundreds of MiB.
        arguments.extend(pair("--memory-limit", &"16GiB"));
        arguments.extend(pair("--seconds", &(self.milliseconds as f64 / 1000.0)));
        arguments.extend(pair("--json", &"-"));
        arguments
    }

    /// Arguments of llama-bench for one depth and cache type. Flash attention is on because a
    /// quantized cache of values needs it, and for f16 as well because it is the faster way.
    pub(super) fn llama_generate(&self, model: &str, depth: Depth, format: &str) -> Vec<String> {
        let mut arguments = Vec::new();
        arguments.extend(pair("-m", &model));
        arguments.extend(pair("-t", &self.threads));
        arguments.extend(pair("-fa", &"on"));
        arguments.extend(pair("-ctk", &format));
        arguments.extend(pair("-ctv", &format));
        arguments.extend(pair("-p", &0));
        arguments.extend(pair("-n", &self.generate));
        arguments.extend(pair("-d", &depth.0));
        arguments.extend(pair("-r", &self.repeats));
        arguments.extend(pair("-o", &"json"));
        arguments
    }

    /// Arguments of kivi for one depth.
    pub(super) fn kivi_generate(&self, model: &str, depth: Depth) -> Vec<String> {
        let mut arguments = vec!["bench".to_owned(), "generate".to_owned()];
        arguments.extend(pair("--model", &model));
        arguments.extend(pair("--depth", &depth.0));
        arguments.extend(pair("--batch", &1));
        arguments.extend(pair("--format", &list(KIVI)));
        arguments.extend(pair("--prompt", &1)); // its speed is not asked for
        arguments.extend(pair("--generate", &self.generate));
        arguments.extend(pair("--repeats", &self.repeats));
        arguments.extend(pair("--threads", &self.threads));
        arguments.extend(pair("--json", &"-"));
        arguments
    }

    /// Attention at every shape.
    pub(super) fn attention(
        &self,
        llama: &LlamaCpp,
        machine: &Machine,
    ) -> Result<Vec<Measured<Shape>>, Problem> {
        let kivi = kivi()?;
        let measure = |&shape: &Shape| {
            let mut measured = Measured::new(shape);
            self.alternate(
                &mut measured,
                |measured| {
                    let arguments = self.llama_attention(&shape, machine);
                    measured.add_llama_cpp(&output(command(&llama.attention, &arguments))?)
                },
                |measured| {
                    let arguments = self.kivi_attention(&shape);
                    measured.add_kivi(&output(command(&kivi, &arguments))?)
                },
            )?;
            Ok(measured)
        };
        self.shapes.iter().map(measure).collect()
    }

    /// Decoding with the whole model at every depth, and what llama-bench said about itself.
    pub(super) fn generation(
        &self,
        llama: &LlamaCpp,
        model: &Path,
    ) -> Result<(Vec<Measured<Depth>>, Run), Problem> {
        let kivi = kivi()?;
        let model = model.to_string_lossy();
        let mut run = Run::default();
        let mut all = Vec::new();
        for &depth in &self.depths {
            let mut measured = Measured::new(depth);
            self.alternate(
                &mut measured,
                |measured| {
                    for format in formats(LLAMA) {
                        let arguments = self.llama_generate(&model, depth, format);
                        run = measured
                            .add_llama_bench(&output(command(&llama.bench, &arguments))?)?;
                    }
                    Ok(())
                },
                |measured| {
                    let arguments = self.kivi_generate(&model, depth);
                    measured.add_kivi(&output(command(&kivi, &arguments))?)
                },
            )?;
            all.push(measured);
        }
        Ok((all, run))
    }

    /// Measures one case in every round, by one program and then by the other.
    fn alternate<K>(
        &self,
        measured: &mut Measured<K>,
        mut llama: impl FnMut(&mut Measured<K>) -> Result<(), Problem>,
        mut kivi: impl FnMut(&mut Measured<K>) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        for round in 0..self.rounds {
            if Self::llama_cpp_first(round) {
                llama(measured)?;
                kivi(measured)?;
            } else {
                kivi(measured)?;
                llama(measured)?;
            }
        }
        Ok(())
    }
}

fn shape_arguments(shape: &Shape) -> Vec<String> {
    let heads = format!("{}/{}", shape.query_heads, shape.kv_heads);
    let mut arguments = Vec::new();
    arguments.extend(pair("--tokens", &shape.tokens));
    arguments.extend(pair("--heads", &heads));
    arguments.extend(pair("--head-dim", &shape.head_dim));
    arguments
}

/// An option and its value.
fn pair(name: &str, value: &impl ToString) -> [String; 2] {
    [name.to_owned(), value.to_string()]
}

/// The formats of a program, as its options take them.
fn list(program: &str) -> String {
    formats(program).collect::<Vec<_>>().join(",")
}
