//! An engine on a thread of its own.

mod common;

use common::{Random, alone, layers, model, small};
use kivi_engine::{Engine, EngineHandle, Error, Event, Request};
use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::Thread,
};

fn start() -> EngineHandle {
    let model = model(1);
    let config = small().build().unwrap();
    let layers = layers(&model, &config);
    Engine::builder(&model)
        .cache(config, layers)
        .kv_memory(60_000)
        .build()
        .unwrap()
        .start()
        .unwrap()
}

#[test]
fn threads_submit_and_cancel() {
    let (model, config, handle) = (model(1), small().build().unwrap(), start());
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (handle, model, config) = (handle.clone(), &model, &config);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for round in 0..6 {
                    let length = 1 + random.below(80);
                    let request = Request::new(random.tokens(length), 1 + random.below(30));
                    let mut events = handle.submit(request.clone());
                    if round % 3 == 2 {
                        // Goes away in the middle.
                        events.blocking_next();
                        continue;
                    }
                    assert_eq!(events.wait().unwrap(), alone(model, config, &request));
                }
            });
        }
    });
    // Refused requests answer through their events.
    let mut refused = handle.submit(Request::new(vec![], 1));
    let Some(Event::Failed(error)) = refused.blocking_next() else { panic!("not refused") };
    assert!(matches!(*error, Error::InvalidRequest { .. }));
    assert!(refused.blocking_next().is_none());
    handle.shut_down();
    assert!(handle.stats().generated_tokens > 300);
}

#[test]
fn what_is_unanswered_at_the_end_says_so() {
    let handle = start();
    let requests = (0..40).map(|_| handle.submit(Request::new(vec![1, 2, 3], 400)));
    let requests: Vec<_> = requests.collect();
    handle.shut_down();
    let stopped = requests.into_iter().filter_map(|events| events.wait().err());
    assert!(stopped.filter(|error| matches!(**error, Error::Stopped)).count() > 20);
    let error = handle.submit(Request::new(vec![1], 1)).wait().unwrap_err();
    assert!(matches!(*error, Error::Stopped));
    handle.shut_down();
}

#[test]
fn without_handles_an_engine_answers_what_it_has() {
    let handle = start();
    let events = handle.submit(Request::new(vec![1, 2, 3], 50));
    drop(handle);
    assert_eq!(events.wait().unwrap()[0].tokens.len(), 50);
}

/// Polls a future to its end on this thread: events need no particular runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn events_are_a_stream_of_any_runtime() {
    let (model, config, handle) = (model(1), small().build().unwrap(), start());
    let request = Request::new(vec![5, 6, 7, 8], 30);
    let mut events = handle.submit(request.clone());
    let tokens = block_on(async {
        let mut tokens = Vec::new();
        while let Some(event) = events.next().await {
            if let Event::Token { token, .. } = event {
                tokens.push(token);
            }
        }
        tokens
    });
    assert_eq!(tokens, alone(&model, &config, &request)[0].tokens);
}
