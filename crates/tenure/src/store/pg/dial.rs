//! Connections that the caller opens: through a proxy, with its own TLS, or to a simulated server in tests.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_postgres::{AsyncMessage, Client, Error};

type Opened = Result<(Client, PgDriver), Error>;

/// Closure of the caller that opens a connection.
#[derive(Clone)]
pub(crate) struct ConnectFn(
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = Opened> + Send>> + Send + Sync>,
);

impl ConnectFn {
    pub(crate) fn new<F, Opening, S, T>(f: F) -> Self
    where
        F: Fn() -> Opening + Send + Sync + 'static,
        Opening: Future<Output = Result<(Client, tokio_postgres::Connection<S, T>), Error>>
            + Send
            + 'static,
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self(Arc::new(move || {
            let opening = f();
            Box::pin(async move {
                let (client, connection) = opening.await?;
                Ok((client, PgDriver::new(connection)))
            })
        }))
    }

    pub(super) async fn call(&self) -> Opened {
        (self.0)().await
    }
}

impl fmt::Debug for ConnectFn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ConnectFn")
    }
}

type Poller = Box<dyn FnMut(&mut Context<'_>) -> Poll<Option<Result<AsyncMessage, Error>>> + Send>;

/// Driver of one connection, over any stream: polling it reads and writes.
pub(crate) struct PgDriver(Poller);

impl PgDriver {
    pub(super) fn new<S, T>(mut connection: tokio_postgres::Connection<S, T>) -> Self
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        Self(Box::new(move |context| connection.poll_message(context)))
    }

    pub(super) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<AsyncMessage, Error>>> {
        (self.0)(context)
    }
}
