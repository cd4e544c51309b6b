//! An engine on a thread of its own.

use crate::{Engine, EngineStats, Error, Event, Events, Request, Result};
use kivi_core::DecoderBackend;
use std::{
    sync::{Arc, Mutex},
    thread::JoinHandle,
};
use tokio::sync::{
    mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    watch,
};

/// What threads ask of the engine's.
enum Command {
    Submit(Box<Request>, UnboundedSender<Event>),
    ShutDown,
}

/// Submits requests to an engine that runs on a thread of its own ([`Engine::start`]), from any thread
/// or async task. When the last clone is dropped the engine answers what it has and ends.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: UnboundedSender<Command>,
    stats: watch::Receiver<EngineStats>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Submit(..) => "Submit",
            Self::ShutDown => "ShutDown",
        })
    }
}

impl EngineHandle {
    /// Submits a request and returns at once. A request that is refused has [`Event::Failed`] as its
    /// only event, and so has every request of an engine that has stopped. Dropping the events
    /// cancels the request.
    pub fn submit(&self, request: Request) -> Events {
        let (sender, events) = Events::channel();
        if let Err(refused) = self.commands.send(Command::Submit(Box::new(request), sender))
            && let Command::Submit(_, sender) = refused.0
        {
            let _ = sender.send(Event::Failed(Arc::new(Error::Stopped)));
        }
        events
    }

    /// The counters after the latest step.
    pub fn stats(&self) -> EngineStats {
        self.stats.borrow().clone()
    }

    /// Stops the engine after the current step and waits for its thread; unanswered requests fail with
    /// [`Error::Stopped`].
    pub fn shut_down(&self) {
        // An engine that is gone is stopped.
        let _ = self.commands.send(Command::ShutDown);
        let thread = self.thread.lock().ok().and_then(|mut thread| thread.take());
        if let Some(thread) = thread {
            // If it panicked, its requests have ended with it.
            let _ = thread.join();
        }
    }
}

impl<B: DecoderBackend + 'static> Engine<B> {
    /// Moves the engine to a thread of its own.
    ///
    /// # Errors
    /// When the system has no thread left.
    pub fn start(self) -> Result<EngineHandle, std::io::Error> {
        let (commands, receiver) = unbounded_channel();
        let (publish, stats) = watch::channel(self.stats());
        let builder = std::thread::Builder::new().name("kivi-engine".into());
        let thread = builder.spawn(move || serve(self, receiver, &publish))?;
        Ok(EngineHandle { commands, stats, thread: Arc::new(Mutex::new(Some(thread))) })
    }
}

/// Steps while there is work, and waits for commands while there is none.
fn serve<B: DecoderBackend>(
    mut engine: Engine<B>,
    mut commands: UnboundedReceiver<Command>,
    stats: &watch::Sender<EngineStats>,
) {
    loop {
        let command =
            if engine.is_idle() { commands.blocking_recv() } else { commands.try_recv().ok() };
        match command {
            Some(Command::Submit(request, events)) => {
                if let Err(error) = engine.enqueue(*request, events.clone()) {
                    let _ = events.send(Event::Failed(Arc::new(error)));
                }
                // Everything that has come goes into the next step.
                continue;
            }
            Some(Command::ShutDown) => return engine.abandon_all(),
            // Every handle is gone.
            None if engine.is_idle() => return,
            None => {}
        }
        if let Err(error) = engine.step() {
            tracing::error!("the engine stops: {error}");
            return engine.abandon_all();
        }
        stats.send_replace(engine.stats());
    }
}
