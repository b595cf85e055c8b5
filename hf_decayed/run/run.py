"""The bookkeeping of a training run, written once; the method's loop stays in its script.

    run = Run(parser.run_options(options), kind="mae")
    model, optimizer = run.prepare(model=model, optimizer=optimizer)
    run.resume(dataset=fingerprint)
    for batch in run.batches(images):
        with run.accumulate(model):
            loss = model(**batch).loss
            run.backward(loss)
        run.update(optimizer, model, average)
        if run.due(options.eval_every):
            run.evaluate(monitor, model)
    run.save(model)
    run.finish(run.results(run.evaluate(monitor, model)), "model")

`Run` never sees a loss formula, calls no hooks and has no subclass.
"""

import itertools
import json
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs, PartialState
from accelerate.utils import DistributedType, ProjectConfiguration, broadcast_object_list, set_seed
from filelock import FileLock, Timeout
from huggingface_hub.errors import StrictDataclassError
from torch.optim.swa_utils import AveragedModel
from tqdm.auto import tqdm
from transformers import ImageProcessingMixin, PreTrainedModel

from ..command_line import count_cores, count_loader_workers, set_cpu_threads, threads_of_environment
from ..data.datasets import EpochBatchSampler, identity_collate
from ..data.keyed_random import batch_generator
from ..errors import UserError, format_error, print_error
from ..hub.cards import STOCK_FOLDER, write_card
from ..hub.upload import create_repository, upload_run
from ..plots import require_matplotlib, save_curves
from ..precision import choose_precision, has_instructions
from ..provenance import describe_hardware, sanitized_command, versions
from .arguments import RunOptions
from .checkpoints import (
    LOAD_ERRORS,
    WRITE_ERRORS,
    find_checkpoint,
    gather_state,
    load_part,
    load_random_state,
    read_checkpoint_state,
    save_checkpoint,
    saved_setting,
    scatter_state,
)
from .optimization import ema_with_warmup, is_scaler_warmup
from .records import MetricsFile, replace_text
from .signals import StopSignal, ignore_signals


WRITTEN_LAST = ["results.json"]  # weights without it are of a run that was killed
STREAM_WORKERS = 4  # unless --num_workers is given


class Run:
    """One training run: processes and threads, seeds, resume, signals, checkpoints, metrics, results.

    Args:
        options (`RunOptions`): Flags of the script.
        kind (`str`): Name of the script, without `.py`.
    """

    def __init__(self, options: RunOptions, kind: str):
        self.options, self.kind = options, kind
        self.start_time = time.time()
        self.signal = StopSignal()
        require_matplotlib()
        if options.report_to != "none" and find_spec(options.report_to) is None:  # accelerate would skip it silently
            raise UserError(f"--report_to {options.report_to} needs that package: pip install {options.report_to}.")
        precision, self.precision_reason = self.choose_mixed_precision()
        self.accelerator = Accelerator(
            cpu=not torch.accelerator.is_available(),
            mixed_precision=precision,
            gradient_accumulation_steps=options.gradient_accumulation_steps,
            # Each process takes its share of every global batch, so batches do not depend on the number of processes.
            dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False),
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
            log_with=None if options.report_to == "none" else options.report_to,
            project_config=ProjectConfiguration(str(options.output_dir), str(options.output_dir / "trackers")),
        )
        self.threads = set_cpu_threads(
            self.accelerator, options.cpu_threads or self.saved_setting("cpu_threads", is_thread_count)
        )
        self.num_workers = count_loader_workers(self.accelerator)
        if options.num_workers is not None:
            self.num_workers = min(options.num_workers, count_cores())
        set_seed(options.seed)
        self.device, self.print = self.accelerator.device, self.accelerator.print
        self.is_main_process, self.num_processes = self.accelerator.is_main_process, self.accelerator.num_processes
        self.sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        self.print(
            f"{self.num_processes} process(es) on {self.device.type}, precision {self.accelerator.mixed_precision}"
            + (f" ({self.precision_reason})" if self.precision_reason else "")
            + (f", {self.threads}" if self.threads else "")
        )
        if self.device.type == "cpu" and self.accelerator.mixed_precision == "bf16" and not has_instructions():
            self.print("this CPU has no instructions for bf16, which is slower than float32 then: leave it out")
        self.check_batch_size(options.batch_size)
        if not options.overwrite_output_dir:
            if not options.resume_from_checkpoint:
                refuse_finished_model(options.output_dir)
            elif not has_checkpoint(options.output_dir, options.resume_from_checkpoint):
                refuse_finished_model(options.output_dir, WRITTEN_LAST)
        self.repository = create_repository(options.push_to_hub, self.accelerator)
        self.lock = lock_output_dir(options.output_dir) if self.is_main_process else None

        self.step, self.total_steps, self.schedule_steps = 0, 0, 0
        self.steps_per_epoch: int | None = None
        self.evaluation_start: float | None = None
        self.skipped_steps, self.bad_images, self.earlier_bad_images, self.earlier_seconds = 0, 0, 0, 0.0
        self.parts: dict[str, Any] = {}  # what checkpoints hold, by name
        self.plain: dict[int, torch.nn.Module] = {}  # prepared model -> the model as the script made it
        self.losses: dict[str, torch.Tensor] = {}
        self.metrics: dict[str, object] = {}  # of the current step
        self.unwritten: list[str] = []
        self.in_loop = self.stopping = False

    def saved_setting(self, name: str, is_valid: Callable[[Any], bool]):
        """A setting from the checkpoint to resume; `None` without one."""
        requested, folder = self.options.resume_from_checkpoint, self.options.output_dir / "checkpoints"
        return saved_setting(requested, folder, name, is_valid) if requested else None

    def choose_mixed_precision(self) -> tuple[str | None, str | None]:
        """The precision, the same for all processes, and why `auto` chose it; a resumed run keeps its own."""
        options = self.options
        if options.mixed_precision != "auto":
            return options.mixed_precision, None
        if saved := self.saved_setting("precision", lambda value: value in ("no", "bf16", "fp16")):
            return saved, "as before"
        if os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":  # launchers set `no` if the user set nothing
            return None, "as accelerate was told"
        threads = options.cpu_threads or threads_of_environment() or 1
        main_process = PartialState(cpu=not torch.accelerator.is_available()).is_main_process
        shape = options.block_shape()
        choice = [choose_precision(**shape, threads=threads, training=True) if main_process else None]
        return broadcast_object_list(choice)[0]

    def check_batch_size(self, batch_size: int) -> None:
        shares = self.num_processes * self.options.gradient_accumulation_steps
        if batch_size % shares != 0:
            raise UserError(
                f"--batch_size {batch_size} is not divisible by {shares}: {self.num_processes} process(es) times "
                f"{self.options.gradient_accumulation_steps} accumulation step(s)."
            )

    # Before the loop.

    def progress(self, items, **settings):
        """A progress bar on the main process of each machine, for work before the loop."""
        return tqdm(items, disable=not self.accelerator.is_local_main_process, leave=False, **settings)

    def plan(
        self,
        images,
        max_train_steps: int | None,
        num_train_epochs: float = 0.0,
        schedule_steps: int | None = None,
    ) -> None:
        """Sets `total_steps`, `steps_per_epoch` and `schedule_steps`; a stream has no epochs.

        Args:
            schedule_steps (`int`, *optional*): Steps of the longer run that this one begins; by default `total_steps`.
        """
        if hasattr(images, "__len__"):
            self.steps_per_epoch = max(1, len(images) // self.options.batch_size)
        elif max_train_steps is None:
            raise UserError("A stream has no length: give --max_train_steps.")
        self.total_steps = max_train_steps or round(num_train_epochs * (self.steps_per_epoch or 0))
        if self.total_steps < 1:
            raise UserError("The run has no steps: raise --num_train_epochs or give --max_train_steps.")
        self.schedule_steps = schedule_steps or self.total_steps
        if self.schedule_steps < self.total_steps:
            raise UserError(
                f"--schedule_steps {schedule_steps} ends before the training, which has {self.total_steps} steps."
            )

    def warmup_steps(self, epochs: float) -> int:
        """Warm-up epochs as steps, a quarter of a short run at most; a twentieth of the steps of a stream."""
        if self.steps_per_epoch is None:
            return self.schedule_steps // 20
        return min(round(epochs * self.steps_per_epoch), self.schedule_steps // 4)

    def average(
        self, model: torch.nn.Module, name: str = "average", use_buffers: bool = False
    ) -> tuple[AveragedModel | None, torch.nn.Module]:
        """The EMA of the weights (`None` without `ema_decay`), and the network to evaluate and save.

        Checkpoints hold the EMA.
        """
        if not self.options.ema_decay:
            return None, model
        if self.sharded:
            raise UserError(
                "--ema_decay keeps a whole copy of the weights, which sharded training does not have: give --ema_decay 0."
            )
        average = AveragedModel(
            model, multi_avg_fn=ema_with_warmup(self.options.ema_decay), use_buffers=use_buffers
        ).to(self.device)
        self.parts[name] = average
        return average, average.module

    def track(self, **parts) -> None:
        """Adds objects with `state_dict` and `load_state_dict` to the checkpoints, without preparing them."""
        self.parts.update(parts)
        self.plain |= {id(part): part for part in parts.values() if isinstance(part, torch.nn.Module)}

    def prepare(self, **parts) -> tuple:
        """Models and optimizers as accelerate prepares them, in order; checkpoints hold them under these names."""
        for part in parts.values():
            if isinstance(part, torch.nn.Module):
                if self.sharded and not isinstance(
                    part, PreTrainedModel
                ):  # `ModelMixin.save_pretrained` takes no state
                    raise UserError(
                        f"{type(part).__name__} is a network of diffusers, which cannot save sharded weights: train it "
                        "without FSDP and DeepSpeed."
                    )
                self.print(f"{describe_model(part)}; {self.total_steps} steps of {self.options.batch_size}")
        # Every process has made the same model; dropout differs between processes from here on.
        set_seed(self.options.seed, device_specific=True)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # it cannot see a loader's batch size
            micro_batch = self.options.batch_size // self.options.gradient_accumulation_steps
            config = self.accelerator.state.deepspeed_plugin.deepspeed_config
            config["train_micro_batch_size_per_gpu"] = micro_batch // self.num_processes
        if self.options.gradient_checkpointing:
            for part in parts.values():
                if isinstance(part, torch.nn.Module):
                    transformers_model = isinstance(part, PreTrainedModel)
                    part.gradient_checkpointing_enable() if transformers_model else part.enable_gradient_checkpointing()
        compiled = [
            torch.compile(part) if self.options.compile and isinstance(part, torch.nn.Module) else part
            for part in parts.values()
        ]
        prepared = self.accelerator.prepare(*compiled)
        prepared = prepared if len(parts) > 1 else (prepared,)
        for (name, part), wrapped in zip(parts.items(), prepared):
            self.parts[name] = wrapped if self.sharded else part
            if isinstance(part, torch.nn.Module):
                self.plain[id(wrapped)] = part
        if self.accelerator.scaler is not None:
            self.parts["scaler"] = self.accelerator.scaler
        return prepared

    def resume(self, **signature) -> None:
        """Loads the checkpoint that `--resume_from_checkpoint` names, or clears the output folder for a new run.

        Args:
            signature: What defines the run besides its flags, such as the fingerprint of its data. It is compared
                with the checkpoint's before anything is loaded.
        """
        options = self.options
        self.signature = json.loads(
            json.dumps({**options.signature, "steps": self.total_steps, **signature}, default=str)
        )
        # What was chosen, by a trial or by the launcher, is part of the run.
        self.signature["mixed_precision"] = self.accelerator.mixed_precision
        folder, path = options.output_dir / "checkpoints", None
        if options.resume_from_checkpoint:
            path = find_checkpoint(options.resume_from_checkpoint, folder)
            if path is None:
                if not options.overwrite_output_dir:  # it has checkpoints, all of them damaged
                    refuse_finished_model(options.output_dir, WRITTEN_LAST)
                self.print(f"no checkpoint in {folder}: starting from the beginning")
        if path is not None:  # before anything is cleared
            state = read_checkpoint_state(path)
            saved = state.get("signature", {})
            if saved.get("mixed_precision") is None:  # older versions recorded what was used, not what was asked for
                saved["mixed_precision"] = state.get("precision")
            check_signature(path.name, saved, self.signature)
        continued = path is not None and has_checkpoint(options.output_dir, str(path))
        if self.is_main_process and not continued and (path or not options.resume_from_checkpoint):
            clear_output_dir(options.output_dir, options.overwrite_output_dir)
        self.accelerator.wait_for_everyone()
        if path is not None:
            try:
                self.load_checkpoint(path, state)
            except LOAD_ERRORS as error:  # its checksums match: it was written like this, perhaps by another version
                reason = f"it has no {error}" if isinstance(error, KeyError) else format_error(error)
                raise UserError(f"'{path.name}' does not fit this run: {reason[:300]}") from error
            self.print(f"resumed at step {self.step} from {path}")
        before = path.parent.parent / "metrics.jsonl" if path is not None and not continued else None
        self.log = MetricsFile(options.output_dir / "metrics.jsonl", self.step, self.is_main_process, before)
        self.accelerator.init_trackers(self.kind, config={name: str(value) for name, value in options.flags.items()})
        if self.is_main_process:
            with self.writing("arguments.json"):
                (options.output_dir / "arguments.json").write_text(json.dumps(options.flags, indent=2, default=str))

    def load_checkpoint(self, path: Path, state: dict) -> None:
        for name, part in self.parts.items():
            state_of_part = load_part(path, name)
            if self.sharded:
                scatter_state(part, state_of_part, self.models())
            else:
                part.load_state_dict(state_of_part)
        load_random_state(self.accelerator, path)
        self.step, self.skipped_steps = state["step"], state["skipped_steps"]
        self.earlier_seconds, self.earlier_bad_images = state["seconds"], state["bad_images"]

    # The loop.

    def batches(self, images) -> Iterator[dict[str, torch.Tensor]]:
        """Yields micro-batches from the current step to the last; finishes a step after its last micro-batch.

        `batch_generator` draws random numbers for the micro-batch as a whole. A signal ends the script after a
        checkpoint is written.
        """
        accumulation = self.options.gradient_accumulation_steps
        self.images, self.bad_here = images, torch.zeros((), dtype=torch.long, device=self.device)
        self.bar = tqdm(
            total=self.total_steps,
            initial=self.step,
            disable=not self.accelerator.is_local_main_process,
            unit="step",
            dynamic_ncols=True,
        )
        self.window_start, self.window_steps, self.evaluation_start = time.perf_counter(), 0, None
        self.signal.deferring = self.in_loop = True
        for model in self.plain.values():
            model.train()
        if self.step < self.total_steps:
            for number, batch in enumerate(self.loader(images)):
                part = number % accumulation
                self.bad_here += batch.pop("bad_images", self.bad_here.new_zeros(1)).sum()
                self.batch_generator = batch_generator(
                    self.options.seed, self.step, part, self.accelerator.process_index
                )
                yield batch
                if part == accumulation - 1:
                    self.finish_step()
                    if self.step == self.total_steps:
                        break
        self.in_loop, self.signal.finishing = False, True
        self.bar.close()
        self.bad_images = self.count_bad_images()

    def loader(self, images):
        options, parts = self.options, self.options.gradient_accumulation_steps
        settings: dict[str, object] = {
            "num_workers": self.num_workers if images.uses_workers else 0,
            "pin_memory": self.device.type == "cuda",
            "generator": torch.Generator(),  # its own: starting to iterate must not advance the one of dropout
            "worker_init_fn": ignore_signals,
        }
        if hasattr(images, "__len__"):
            batches = EpochBatchSampler(
                len(images), options.batch_size, options.seed, self.step, self.total_steps, parts
            )
            loader = torch.utils.data.DataLoader(
                images, batch_sampler=batches, collate_fn=identity_collate, **settings
            )
            return self.accelerator.prepare(loader)
        # With accelerate, one process reads a stream and hands out shares. Resuming reads past what was already seen.
        # The order of a stream depends on the number of workers, which must not follow from a thread trial.
        workers = STREAM_WORKERS if options.num_workers is None else options.num_workers
        settings["num_workers"] = min(workers, count_cores(), images.num_shards)
        loader = torch.utils.data.DataLoader(
            images, batch_size=options.batch_size // parts, drop_last=True, **settings
        )
        return itertools.islice(self.accelerator.prepare(loader), self.step * parts, self.total_steps * parts)

    def set_learning_rate(self, optimizer: torch.optim.Optimizer, rate: float) -> None:
        """Sets the learning rate of this step, times `rate_scale` in groups that have one, such as lower layers."""
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("rate_scale", 1.0)

    def accumulate(self, *models):
        """Gradients are synchronised and applied once every `gradient_accumulation_steps` micro-batches."""
        return self.accelerator.accumulate(*models)

    def backward(self, loss: torch.Tensor, name: str = "loss") -> None:
        """Adds the gradients of a loss; its mean over micro-batches and processes is recorded under `name`."""
        self.accelerator.backward(loss)
        share = loss.detach() / self.options.gradient_accumulation_steps
        self.losses[name] = self.losses[name] + share if name in self.losses else share

    def update(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        average: AveragedModel | None = None,
        loss: str = "loss",
    ) -> None:
        """One optimizer step, after the last micro-batch: clips, skips non-finite gradients, updates the average.

        Args:
            loss (`str`, defaults to `"loss"`): Name of the loss that this step minimises, if there are several.
        """
        accelerator = self.accelerator
        if not accelerator.sync_gradients:
            return
        norm = accelerator.clip_grad_norm_(model.parameters(), self.options.max_grad_norm or math.inf)
        gradient_norm = 0.0 if norm is None else float(norm)  # DeepSpeed clips by itself and may return nothing
        # One reduction per step tells every process the mean loss, and whether any process received a signal.
        received = torch.tensor(float(self.signal.received), device=self.device)
        mean_loss, stopping = accelerator.reduce(torch.stack([self.losses.pop(loss), received]), "mean").tolist()
        # With fp16 the gradient scaler skips overflowing steps itself, and has to see them to lower its scale.
        finite = math.isfinite(mean_loss) and math.isfinite(gradient_norm)
        if finite or accelerator.scaler is not None:
            optimizer.step()
        if finite and not accelerator.optimizer_step_was_skipped:
            if average is not None:
                average.update_parameters(self.plain[id(model)])
        elif not is_scaler_warmup(accelerator.scaler, mean_loss):
            self.skipped_steps += 1
        optimizer.zero_grad()
        prefix = "" if loss == "loss" else f"{loss}_"
        rate = max(group["lr"] for group in optimizer.param_groups)
        self.metrics |= {loss: mean_loss, f"{prefix}learning_rate": rate, f"{prefix}gradient_norm": gradient_norm}
        self.stopping = stopping > 0
        if self.skipped_steps > self.options.max_skipped_steps:
            raise UserError(
                f"{self.skipped_steps} steps without a finite loss, the last at {self.step + 1}: try a lower learning rate, "
                "--max_grad_norm 1, --mixed_precision no, or a --shortcut_decay closer to 1."
            )

    def due(self, every: int | None) -> bool:
        """Whether the current step is a multiple of `every`; never the last, which the end of the script evaluates."""
        last = self.step + 1 == self.total_steps
        if not every or last or not self.accelerator.sync_gradients or (self.step + 1) % every != 0:
            return False
        self.evaluation_start = self.evaluation_start or time.perf_counter()
        return True

    @property
    def logging(self) -> bool:
        """Whether the current step is written to the metrics."""
        step = self.step + 1
        evaluating = self.options.eval_every and step % self.options.eval_every == 0
        return bool(evaluating) or step % self.options.log_every == 0 or step == self.total_steps

    def evaluate(self, monitor, network, picture: str | None = None) -> dict[str, float]:
        """Records what a monitor measures of a network; its picture goes to `<picture>/step-N.png`, or at the end to
        `<picture>.png`."""
        metrics = monitor.evaluate(network)
        self.record(metrics)
        if picture:
            name = f"{picture}/step-{self.step + 1:08d}.png" if self.in_loop else f"{picture}.png"
            with self.writing(name):
                monitor.picture(self.options.output_dir / name)
        return metrics

    def record(self, metrics: dict) -> None:
        """Adds metrics to the current step; outside of the loop, writes them at once."""
        if self.in_loop:
            self.metrics |= metrics
        else:
            self.log.write({"step": self.step, **metrics})
            self.accelerator.log(metrics, step=self.step)

    def finish_step(self) -> None:
        options = self.options
        logging = self.logging
        self.step += 1
        self.window_steps += 1
        self.bar.update()
        if logging:
            now = time.perf_counter()
            rate = self.window_steps * options.batch_size / ((self.evaluation_start or now) - self.window_start)
            self.window_start, self.window_steps = now, 0
            record = {
                "epoch": self.step / self.steps_per_epoch if self.steps_per_epoch else None,
                **self.metrics,
                "skipped_steps": self.skipped_steps,
                "bad_images": self.count_bad_images(),
                "images_per_second": rate,
            }
            self.log.write({"step": self.step, **record})
            self.accelerator.log(record, step=self.step)
            shown = {name: f"{value:.4f}" for name, value in record.items() if name.endswith("loss")}
            self.bar.set_postfix(**shown, lr=f"{record.get('learning_rate', 0.0):.1e}", images=f"{rate:.0f}/s")
        elif self.evaluation_start:
            self.window_start, self.window_steps = time.perf_counter(), 0
        self.metrics, self.evaluation_start = {}, None
        if self.stopping or self.step % options.checkpointing_steps == 0:
            saved = self.save_checkpoint()
            if self.stopping and self.step < self.total_steps:
                self.stop(saved)

    def count_bad_images(self) -> int:
        """Images that could not be decoded so far, over all processes: before training, before resuming, and since."""
        here = self.accelerator.reduce(self.bad_here, "sum").item() if self.images.uses_workers else 0
        return self.images.bad_images + self.earlier_bad_images + here

    def save_checkpoint(self) -> Path | None:
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            self.print("no checkpoint: those of DeepSpeed are pickles, which are not loaded here; use FSDP2")
            return None
        state = {
            "signature": self.signature,
            "skipped_steps": self.skipped_steps,
            "bad_images": self.count_bad_images() - self.images.bad_images,
            "seconds": self.earlier_seconds + time.time() - self.start_time,
            "cpu_threads": torch.get_num_threads() if self.device.type == "cpu" else None,
            "precision": self.accelerator.mixed_precision,
        }
        parts = {name: self.state_of(part) for name, part in self.parts.items()}
        folder = self.options.output_dir / "checkpoints"
        return save_checkpoint(self.accelerator, folder, self.step, state, parts, self.options.checkpoints_total_limit)

    def state_of(self, part) -> dict:
        return gather_state(part, self.models()) if self.sharded else part.state_dict()

    def models(self) -> list[torch.nn.Module]:
        return [part for part in self.parts.values() if isinstance(part, torch.nn.Module)]

    def request_stop(self, reason: str) -> None:
        """Stops after the current step, as a signal does."""
        self.signal.received, self.signal.name = True, reason

    def stop(self, saved: Path | None) -> None:
        self.bar.close()
        how = "continue" if saved else "its checkpoint could not be written; continue from an earlier one"
        self.print(f"stopped by {self.signal.name} at step {self.step}; {how} with --resume_from_checkpoint latest")
        self.disconnect()
        sys.exit(0)

    def disconnect(self) -> None:
        """Ends trackers and the connection to the other processes."""
        self.accelerator.end_training()
        if self.num_processes > 1:
            # Gloo's thread needs the interpreter to release what it gathered last. When the networks go, Python waits for that
            # thread without letting it, which is a deadlock if it is not done by then.
            time.sleep(0.2)

    # After the loop.

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Catches a full disk while `name` is written; `finish` reports it, with exit code 2."""
        try:
            yield
        except WRITE_ERRORS as error:
            self.unwritten.append(f"{name} ({format_error(error)})")
            print(f"{name} could not be written: {format_error(error)}", file=sys.stderr)

    def save(self, model, name: str = "model") -> None:
        """Writes a model, pipeline or processor to the output folder, by its `save_pretrained`; all processes call it."""
        weights = {}
        if self.sharded and not isinstance(model, ImageProcessingMixin):  # gathered by all processes, written by one
            weights = {"state_dict": self.accelerator.get_state_dict(self.models()[0])}
        if self.is_main_process:
            with self.writing(name):
                model.save_pretrained(self.options.output_dir, **weights)
        self.accelerator.wait_for_everyone()

    def results(self, measured: dict) -> dict:
        """What the script measured and its data, together with everything that the run itself records.

        Only the main process, which writes the metrics, knows the mean of the last losses.
        """
        options = self.options
        return {
            "loss": self.log.recent("loss"),
            **measured,
            "steps": self.step,
            "images_seen": self.step * options.batch_size,
            "skipped_steps": self.skipped_steps,
            "bad_images": self.bad_images,
            "seconds": round(self.earlier_seconds + time.time() - self.start_time, 1),
            "command": " ".join(["accelerate launch", f"training/{self.kind}.py", *sanitized_command()]),
            "seed": options.seed,
            "processes": self.num_processes,
            "precision": self.accelerator.mixed_precision,
            **({"precision_chosen": self.precision_reason} if self.precision_reason else {}),
            "hardware": describe_hardware(self.accelerator),
            "threads": self.threads,
            "versions": versions(),
        }

    def finish(self, results: dict, files: str, card: bool = True) -> None:
        """Writes results, curves and card, and uploads; `files` names what the script itself has written."""
        folder = self.options.output_dir
        self.accelerator.wait_for_everyone()
        if self.is_main_process:
            with self.writing("results.json"):
                replace_text(folder / "results.json", json.dumps(results, indent=2) + "\n")
            if self.log.records():
                with self.writing("curves.png"):
                    save_curves(folder / "curves.png", self.log.records())
                files += ", curves.png"
            if card and not self.unwritten:
                with self.writing("README.md"):
                    write_card(folder)
            if not self.log.flush():
                self.unwritten.append("metrics.jsonl")
            if self.unwritten:
                print(f"{self.kind}.py: not written: {'; '.join(self.unwritten)}", file=sys.stderr)
            else:
                print(f"{files}, results.json: {folder}")
            if self.repository and not self.unwritten:
                upload_run(self.repository, folder)
        self.disconnect()
        if self.lock is not None:
            self.lock.release()
        if self.unwritten:
            sys.exit(2)


def describe_model(model: torch.nn.Module) -> str:
    """Name, size and decay of a network, for the first lines of a run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    words = [f"{type(model).__name__}: {parameters / 1e6:.1f} M parameters"]
    config = getattr(model, "config", None)
    decay = getattr(config, "shortcut_decay", None)
    if decay is not None:
        words.append(f"shortcut_decay {decay}")
    effective_decay = getattr(model, "effective_decay", None) or getattr(config, "effective_decay", None)
    if effective_decay is not None:
        words.append(f"effective decay {effective_decay():.1e}")
    return ", ".join(words)


def lock_output_dir(folder: Path) -> FileLock:
    """Locks the output folder for this process; the operating system releases the lock however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / ".lock"), folder / ".lock-holder.json"
    try:
        lock.acquire(blocking=False)
    except Timeout:
        try:
            process = json.loads(holder.read_text())
            who = f"process {process['pid']} on {process['host']}"
        except (OSError, ValueError, KeyError):
            who = "another process"
        raise UserError(f"'{folder}' is in use by {who}: wait for it, or name another --output_dir.") from None
    holder.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    return lock


def is_thread_count(value) -> bool:
    return isinstance(value, int) and value > 0


def has_checkpoint(output_dir: Path, requested: str) -> bool:
    """Whether the requested checkpoint is one of this output folder; whether it is complete is another question."""
    folder = output_dir / "checkpoints"
    if requested == "latest":
        return any(folder.glob("step-*"))
    return Path(requested).resolve().is_relative_to(folder.resolve())


def refuse_finished_model(folder: Path, signs=("results.json", "model_index.json", "model.safetensors")) -> None:
    """Refuses a folder with a finished model, which is replaced only if the user says so."""
    for name in signs:
        if (folder / name).exists():
            raise UserError(
                f"'{folder}' holds a finished model ({name}): name another --output_dir, or give --overwrite_output_dir to "
                "replace it."
            )


def clear_output_dir(folder: Path, overwrite: bool = False) -> None:
    """Makes room for a new run; an unfinished run in the folder is an error, unless `overwrite` is set."""
    if any((folder / "checkpoints").glob("[!.]*")):  # hidden ones were being written when the run was killed
        if not overwrite and not (folder / "results.json").exists():
            raise UserError(
                f"'{folder}' holds a run that did not finish: continue it with --resume_from_checkpoint latest, "
                "or name another --output_dir."
            )
        shutil.rmtree(folder / "checkpoints")
    (folder / "results.json").unlink(missing_ok=True)
    for name in ("results", STOCK_FOLDER):  # evaluations and a stock copy of the model that is replaced
        shutil.rmtree(folder / name, ignore_errors=True)


def check_signature(name: str, saved: dict, signature: dict) -> None:
    """Refuses the checkpoint of another run, and names the flags that differ."""
    # Older versions did not record what the launcher or the memory decided.
    unknown = {flag for flag in ("mixed_precision", "decoded") if saved.get(flag) is None}  # to older versions
    words = {"decoded": "--memory_limit_gb:"}
    changed = [
        f"{words.get(flag, flag)} {saved.get(flag)} -> {value}"
        for flag, value in signature.items()
        if saved.get(flag) != value and flag not in unknown
    ]
    if changed:
        raise UserError(f"'{name}' belongs to another run ({', '.join(changed)}): resume with its flags.")


def script_main(main: Callable[[], None]) -> None:
    """Runs a script; a user's error prints one sentence and exits with code 2, a signal before the loop with 130."""
    name = Path(sys.argv[0]).name
    try:
        main()
    except KeyboardInterrupt as error:
        print_error(name, error, f"stopped by {error or 'SIGINT'} before the first step")
        sys.exit(130)
    except (UserError, StrictDataclassError, ValueError, OSError) as error:
        print_error(name, error)
        sys.exit(2)
