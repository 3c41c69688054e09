"""rl4co: a policy learns tours of a travelling salesman by REINFORCE. It draws its own data."""

import copy
import io

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rl4co.envs import TSPEnv
from rl4co.models import REINFORCE, AttentionModelPolicy
from rl4co.utils.trainer import RL4COTrainer

from tests.projects.quickstarts.quickstart import Quickstart, weights


def main(run: Quickstart) -> None:
    env = TSPEnv(generator_params={"num_loc": 6})

    def network() -> REINFORCE:
        policy = AttentionModelPolicy(
            env_name="tsp", embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=32
        )
        return REINFORCE(
            env,
            policy,
            baseline="rollout",
            batch_size=run.batch_size(16),
            train_data_size=64,
            val_data_size=32,
            test_data_size=32,
            optimizer_kwargs={"lr": 1e-3},
        )

    def trainer(epochs: int, name: str) -> RL4COTrainer:
        saver = ModelCheckpoint(run.folder / name, monitor="val/reward", save_last=True)
        options = run.options(default_root_dir=run.folder, callbacks=[saver])
        # The baseline is copied or not, as each rank finds; with zero=3 all ranks must copy.
        options["sync_batchnorm"] = run.name == "zero=3"
        return RL4COTrainer(max_epochs=epochs, **options)

    model, first = network(), trainer(2, "first")
    with run.part("train") as numbers:
        first.fit(model)
        numbers["reward"] = first.callback_metrics["val/reward"]
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        loaded = REINFORCE.load_from_checkpoint(saver.best_model_path, weights_only=False)
        numbers["weights"] = len(weights(loaded.policy))
    with run.part("predict") as numbers:
        first.test(model)
        numbers["reward"] = first.callback_metrics["test/reward"]
    with run.part("use") as numbers:
        policy = copy.deepcopy(model.policy).eval()
        tours = policy(env.reset(batch_size=[64]), env, phase="test", decode_type="greedy")
        numbers["reward"] = tours["reward"].mean()
        torch.save(policy.state_dict(), io.BytesIO())
