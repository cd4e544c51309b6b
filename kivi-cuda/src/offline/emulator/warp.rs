//! Operations of a whole warp.

use super::parse::{Operation, ShuffleMode};
use super::{Block, State, stuck};
use crate::offline::CodegenError;
use half::f16;

impl Block<'_> {
    /// Carries out the operation that the warp from thread `first` on waits at; whether there was
    /// one.
    pub(super) fn warp_operation(&mut self, first: usize) -> Result<bool, CodegenError> {
        let lanes = first..self.threads.len().min(first + 32);
        let waiting = |thread: usize| self.threads[thread].state == State::Warp;
        if !lanes.clone().any(waiting) {
            return Ok(false);
        }
        let program = self.program;
        let at = lanes.clone().find(|&thread| waiting(thread)).map(|t| self.threads[t].next);
        let at = at.unwrap_or(0);
        let together = |thread: usize| waiting(thread) && self.threads[thread].next == at;
        // `aligned` and a full mask: the whole warp, or those of it that have not ended.
        if !lanes.clone().all(|t| together(t) || self.threads[t].state == State::Done) {
            return Err(stuck("a warp's threads wait at different instructions"));
        }
        let instruction = &program.instructions[at];
        match instruction.operation {
            Operation::WarpBarrier => {}
            Operation::Shuffle(mode) => {
                let values: Vec<_> = lanes
                    .clone()
                    .map(|thread| {
                        let value = |i: usize| self.value(thread, instruction.sources[i]);
                        (value(0), value(1) as u32)
                    })
                    .collect();
                for (lane, thread) in lanes.clone().enumerate() {
                    let argument = values[lane].1;
                    let lane = lane as u32;
                    let source = match mode {
                        ShuffleMode::Xor => lane ^ argument,
                        ShuffleMode::Index => argument % 32,
                        ShuffleMode::Up => lane.checked_sub(argument).unwrap_or(lane),
                        ShuffleMode::Down => lane + argument,
                    };
                    let source = if source < 32 { source } else { lane };
                    let value = values.get(source as usize).map_or(0, |&(value, _)| value);
                    let destinations = &instruction.destinations;
                    self.threads[thread].registers[destinations[0]] = value & 0xffff_ffff;
                    if let Some(&predicate) = destinations.get(1) {
                        self.threads[thread].registers[predicate] = 1;
                    }
                }
            }
            Operation::Matrix => self.matrix(first, at)?,
            _ => return Err(stuck("not an operation of a warp")),
        }
        for thread in lanes {
            let thread = &mut self.threads[thread];
            if thread.state == State::Warp {
                thread.state = State::Running;
                thread.next += 1;
            }
        }
        Ok(true)
    }

    /// `mma.m16n8k16`, f16 with f32 sums: fragments as the PTX manual draws them (section "Matrix
    /// Fragments for mma.m16n8k16 with floating point type").
    ///
    /// Products are exact and summed in f64, then rounded once; a device rounds more often.
    fn matrix(&mut self, first: usize, at: usize) -> Result<(), CodegenError> {
        let program = self.program;
        let instruction = &program.instructions[at];
        if self.threads.len() < first + 32 {
            return Err(stuck("a product of an incomplete warp"));
        }
        let (mut a, mut b, mut c) = ([[0.0; 16]; 16], [[0.0; 8]; 16], [[0.0; 8]; 16]);
        for lane in 0..32 {
            let (group, member) = (lane / 4, lane % 4);
            let value = |i: usize| self.value(first + lane, instruction.sources[i]);
            let halves = |i: usize| {
                let word = value(i) as u32;
                [word as u16, (word >> 16) as u16].map(|half| f16::from_bits(half).to_f64())
            };
            for h in 0..2 {
                let column = 2 * member + h;
                // Registers 0 and 2: row `group`; 1 and 3: eight below. 2 and 3: eight to the right.
                a[group][column] = halves(0)[h];
                a[group + 8][column] = halves(1)[h];
                a[group][column + 8] = halves(2)[h];
                a[group + 8][column + 8] = halves(3)[h];
                b[column][group] = halves(4)[h];
                b[column + 8][group] = halves(5)[h];
                c[group][column] = f64::from(f32::from_bits(value(6 + h) as u32));
                c[group + 8][column] = f64::from(f32::from_bits(value(8 + h) as u32));
            }
        }
        for lane in 0..32 {
            let (group, member) = (lane / 4, lane % 4);
            for i in 0..4 {
                let (row, column) = (group + 8 * (i / 2), 2 * member + i % 2);
                let sum: f64 = (0..16).map(|k| a[row][k] * b[k][column]).sum();
                let result = (sum + c[row][column]) as f32;
                let register = instruction.destinations[i];
                self.threads[first + lane].registers[register] = result.to_bits().into();
            }
        }
        Ok(())
    }
}
