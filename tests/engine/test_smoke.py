from helpers import *
import memswap, torch
def test_saved(device,new_pool):
    model=new_stack(device); x=new_input(device)
    ref=train_step(model,lambda:model(x))
    s=memswap.saved_tensors(EVERYTHING,pool=new_pool())
    def loss():
        with s: return model(x)
    for _ in range(3):
        g=train_step(model,loss)
        assert_same_gradients(g,ref)
    st=s.stats()
    assert st.moved_storages>0
    assert_nothing_left(st)
def test_manage(device,new_pool):
    model=new_stack(device); x=new_input(device)
    ref=train_step(model,lambda:model(x))
    with memswap.manage(model.layers,EVERYTHING,pool=new_pool()) as s:
      for _ in range(3):
        g=train_step(model,lambda:model(x))
        assert_same_gradients(g,ref)
      st=s.stats()
    assert st.moved_storages>0
    assert_nothing_left(st)
