"""Our recipes with their parts as functions: pyright holds each against the protocol of its part.

The recipes themselves name their parts, so that listing them imports nothing heavy.
"""

from __future__ import annotations

from recipes.agent import agent_config, agent_memory, agent_rules
from recipes.agent import agent_runner as agent_program
from recipes.agent.boxes import image_store as image_pruning
from recipes.embodied import config as embodied_config
from recipes.embodied import embodied_flow, embodied_memory
from recipes.embodied import program as embodied_program
from recipes.embodied.interpreters import locked_venvs
from recipes.embodied.loop import env_errors
from recipes.embodied.rules import job_check
from recipes.embodied.using import evaluation, exporting, recording, trained_policy
from recipes.language import language_flow, language_memory, trained_models
from recipes.language.rules import job_rules
from recipes.math import config as math_config
from recipes.math import program as math_program
from recipes.serve import config as serve_config
from recipes.serve import serve_program
from recipes.sft import config as sft_config
from recipes.sft import sft_program
from recipes.sft_chat import chat_actor, chat_runner, conversations
from recipes.sft_chat import config as chat_config
from recipes.training.conversion import convert
from rlinf_core import Recipe

RECIPES = (
    Recipe(
        name="agent",
        summary="",
        config=agent_config.AgentConfig,
        default_config="",
        program=agent_program.program,
        check=agent_rules.check,
        facts=job_rules.facts,
        memory=agent_memory.forecast,
        placement_notes=agent_memory.placement_notes,
        inputs=agent_config.inputs,
        trials=agent_config.trials,
        flow=language_flow.flow_of,
        collect=image_pruning.collect,
        export=trained_models.export_checkpoint,
        convert=convert.convert_checkpoint,
    ),
    Recipe(
        name="embodied",
        summary="",
        config=embodied_config.EmbodiedConfig,
        default_config="",
        program=embodied_program.program,
        check=job_check.check,
        facts=embodied_config.facts,
        record=recording.record,
        evaluate=evaluation.evaluate,
        play=evaluation.play,
        replay=env_errors.replay,
        export=exporting.export,
        policy=trained_policy.load,
        memory=embodied_memory.forecast,
        inputs=embodied_config.inputs,
        trials=locked_venvs.trials,
        flow=embodied_flow.flow_of,
        convert=convert.convert_checkpoint,
    ),
    Recipe(
        name="math",
        summary="",
        config=math_config.MathConfig,
        default_config="",
        program=math_program.program,
        check=math_config.check,
        facts=job_rules.facts,
        memory=language_memory.forecast,
        inputs=job_rules.inputs,
        trials=job_rules.trials,
        flow=language_flow.flow_of,
        export=trained_models.export_checkpoint,
        evaluate=trained_models.evaluate,
        convert=convert.convert_checkpoint,
    ),
    Recipe(
        name="serve",
        summary="",
        config=serve_config.ServeConfig,
        default_config="",
        program=serve_program.program,
        check=serve_config.check,
        inputs=serve_config.inputs,
    ),
    Recipe(
        name="sft",
        summary="",
        config=sft_config.SftConfig,
        default_config="",
        program=sft_program.program,
        check=sft_config.check,
        facts=embodied_config.facts,
        record=recording.record,
        evaluate=evaluation.evaluate,
        play=evaluation.play,
        export=exporting.export,
        policy=trained_policy.load,
        memory=sft_program.forecast,
        convert=convert.convert_checkpoint,
    ),
    Recipe(
        name="sft_chat",
        summary="",
        config=chat_config.ChatConfig,
        default_config="",
        program=chat_runner.program,
        check=conversations.check,
        facts=job_rules.facts,
        export=trained_models.export_checkpoint,
        evaluate=chat_actor.evaluate,
        memory=chat_actor.forecast,
        inputs=job_rules.inputs,
        convert=convert.convert_checkpoint,
    ),
)
