-- Owns: what the hot path no longer pays for. Runs as webhookd_owner. Each with what it cost a delivery, of about 200 µs of
-- the server's CPU time and 5.2 kB of WAL (the whole cycle without HTTP, the least of five rounds).

-- The deliveries of an event: those that were routed are in uniq_saga_event_subscription, in the same order, so that this
-- one need only have those that were requeued. Three entries less for each delivery, 230 bytes.
-- Built before the keys are dropped, which locks events and subscriptions too: publishing does not wait for the building.
create index idx_saga_event_requeued on webhookd.webhook_delivery_sagas (event_id, subscription_id)
    where dead_letter_id is not null;
drop index webhookd.idx_saga_event;
alter index webhookd.idx_saga_event_requeued rename to idx_saga_event;

-- Foreign keys of rows that are only ever made in bulk: a lock and a lookup for each row, 20 µs and 110 bytes. What they
-- hold is held by a look at each statement's rows instead (saga_of_event_and_subscription, job_of_saga_in_progress), and by
-- events and subscriptions that cannot be deleted, and sagas that cannot while they have jobs.
alter table webhookd.webhook_delivery_sagas
    drop constraint webhook_delivery_sagas_event_id_fkey,
    drop constraint webhook_delivery_sagas_subscription_id_fkey;
alter table webhookd.webhook_delivery_jobs drop constraint webhook_delivery_jobs_saga_id_fkey;

-- A batch changes all rows of a page in one transaction, and what is dead of them is cleared by the next: with half of the page
-- free the new versions find room in it, and a row that stays in its page writes less. The price is space. Not for jobs, whose
-- rows grow: half a page is too little for them, and what does not fit is spread over the free halves of the whole history.
alter table webhookd.webhook_delivery_sagas set (fillfactor = 50);
