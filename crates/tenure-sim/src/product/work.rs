//! The work of users: what each user of a client process does, as the seed decides.

mod locks;
mod probe;
mod special;
mod surroundings;
mod user;

use std::sync::Arc;
use std::time::Duration;

use tenure::{Client, Clock, ErrorKind, LockServerStore};
use tenure_core::Random;

use self::surroundings::{SLOTS, breach, expect_kind, is_healed, ttl_base};
use self::user::User;
use super::client_stream::connect;
use super::host::SECRET;
use super::plan::Work;
use super::referee::{HoldMode, ProductBreach};
use super::world::{self, note};

/// Runs a client process: connects, runs its users, and cleans up.
pub(super) async fn run_client(client: usize, life: u32, clock: Clock, seed: u64) {
    let url = format!("tenure://:{SECRET}@server:1");
    let store = loop {
        let opened =
            LockServerStore::with_connections(&url, clock.clone(), move |_, _| connect(client));
        match opened.await {
            Ok(store) => break store,
            Err(error) => {
                expect_kind(client, "to connect", &error, &[ErrorKind::Unavailable]);
                clock.sleep_until(clock.now() + Duration::from_millis(50)).await;
            }
        }
    };
    let store = Client::with_store(Arc::new(store)).with_clock(clock.clone());
    let (users, chatty, healed) = world::with(|world| {
        let healed = Arc::clone(&world.process(client).healed);
        (world.plan.users, world.plan.chatty, healed)
    });
    let mut tasks = Vec::new();
    for number in 0..users + usize::from(chatty) {
        let mut user = User {
            client,
            life,
            number,
            clock: clock.clone(),
            random: Random::new(seed ^ (number as u64) << 32),
            healed: Arc::clone(&healed),
            store: store.clone(),
            renews: true,
            limited: false,
        };
        tasks.push(tokio::spawn(async move {
            if number < users { user.run().await } else { user.chat().await }
        }));
    }
    for task in tasks {
        // A user that panicked has broken the run already.
        if let Err(error) = task.await {
            breach(ProductBreach::UnexpectedError, format!("a user of client {client}: {error}"));
        }
    }
    store.idle().await;
    world::with(|world| {
        world.process(client).done.set(true);
        note!(world, &format!("client {client}"), "has finished");
    });
    if client == 0 {
        probe::probe(client, &store, &clock).await;
    }
}

impl User {
    async fn run(&mut self) {
        while !is_healed() {
            let pause = self.span(Duration::ZERO, ttl_base() / 2);
            self.sleep(pause).await;
            let work = self.draw_work();
            (self.renews, self.limited) = (true, false);
            match work {
                Work::Lock => self.lock(HoldMode::Exclusive).await,
                Work::Share => self.lock(HoldMode::Shared).await,
                Work::Slot => self.lock(HoldMode::Slot { limit: SLOTS }).await,
                Work::TryLock => self.try_lock().await,
                Work::TimedLock => self.timed_lock().await,
                Work::TwoPhase => self.two_phase().await,
                Work::Cancel => self.cancel().await,
                Work::HandOff => self.hand_off().await,
                Work::MaxHold => self.max_hold().await,
                Work::Detach => self.detach().await,
                Work::Break => self.break_hold().await,
                Work::Elect => self.elect().await,
                Work::Once => self.once().await,
                Work::Inspect => self.inspect().await,
                Work::Outlast => self.outlast().await,
            }
            let (client, number) = (self.client, self.number);
            world::with(|world| {
                world.process(client).set_activity(number, String::new());
                world.counts.borrow_mut().worked(work);
            });
        }
    }
}
