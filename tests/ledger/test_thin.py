from gristmill_testing.ledger import make_event, running_ledger
async def test_batches(tmp_path):
    async with running_ledger(tmp_path) as c:
        assert (await c.register("p")).acked_seq == 0
        assert (await c.post("p", [make_event(1), make_event(2)])).acked_seq == 2
        assert (await c.post("p", [make_event(2), make_event(3)])).acked_seq == 3
        print(await c.usage(group_by="session,token_type", bucket="day"))
        print(await c.usage())
        print(await c.call("GET", "/metrics"))
        print(await c.call("GET", "/v1/events?session=s-1"))
        print(await c.call("GET", "/readyz"))
        print(await c.call("GET", "/nope"))
