"""What takes long shows how far it is; what is to be quiet shows nothing."""

from iclutils import progress


def test_a_bar_appears_where_it_takes_long(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    assert list(progress.bar([1, 2], "things")) == [1, 2]
    assert capsys.readouterr().err == "", "all is quiet here"
    monkeypatch.delenv("ICLUTILS_QUIET")
    assert list(progress.bar([1, 2], "things")) == [1, 2]
    assert "things" in capsys.readouterr().err
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    assert list(progress.bar([1, 2], "things")) == [1, 2]
    assert capsys.readouterr().err == "", "short work shows none"
