"""π0-FAST: actions as tokens. One expert reads images and prompt and writes FAST tokens.

    images, prompt   one block: all attend to all     Action: … | EOS   each attends to the past

What the tokens decode to is up to `piston.tokenizers.fast`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from piston.models import language
from piston.models.configs import Pi0FASTConfig
from piston.models.masks import TokenGroup
from piston.models.model import ActOptions, Model, Response
from piston.observation import Observation

# The released weights were trained to decode with one position left out.
_POSITION_GAP = 1


class Pi0FAST(Model):
    config: Pi0FASTConfig

    def training_losses(
        self,
        observation: Observation,
        actions: Tensor | None = None,  # noqa: ARG002
        draws: Mapping[str, Tensor] | None = None,  # noqa: ARG002
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        """Return `tokens`: cross-entropy of the next token, averaged over the `token_loss_mask`.

        The actions are part of the prompt, as tokens.
        """
        prefix = self.embed_prefix(observation)
        packing = prefix.packing
        # Here, unlike in decoding, positions count padding and absent cameras too.
        mask = language.causal_mask(packing, observation.token_ar_mask)
        output, _ = self.vlm(*self.vlm_inputs(prefix, 0, packing.source, mask))
        return {"tokens": language.next_token_loss(self.vlm, output, packing, observation)}

    @property
    def loss_names(self) -> tuple[str, ...]:
        return ("tokens",)

    def loss_weights(
        self,
        batch: Mapping[str, Any],
        action_weights: Float[Tensor, "b h a"],  # noqa: ARG002
    ) -> dict[str, Float[Tensor, " b"] | Float[Tensor, "b h a"]]:
        return {"tokens": language.token_loss_weights(batch)}

    def act_with(self, observation: Observation, options: ActOptions) -> Response:
        """Continue each prompt until its end token; the row is then filled up with zeros.

        Decoding ends when every row has ended, or after `num_steps` tokens (by default those of the
        configuration).
        """
        if not (options.noise is options.guidance is options.committed is None):
            raise ValueError(
                "π0-FAST does not denoise: it can use no noise and no real-time chunking."
            )
        limit = options.num_steps or self.config.max_decoding_steps
        prefix = self.embed_prefix(observation)
        packing = prefix.packing
        mask = language.causal_mask(packing, observation.token_ar_mask)
        output, caches = self.vlm(*self.vlm_inputs(prefix, packing.size + limit, mask=mask))

        def choose(logits: Float[Tensor, "b v"]) -> Int[Tensor, " b"]:
            if options.visit is not None:
                options.visit(logits)
            return logits.argmax(-1)

        last = language.last_outputs(output, packing)
        written = language.write(
            *(self.vlm, last, caches, packing, limit),
            dtype=self.compute_dtype,
            position_gap=_POSITION_GAP,
            choose=choose,
        )
        return Response(written.tokens)

    def token_groups(self) -> list[TokenGroup]:
        codes = TokenGroup("codes", None, "generated one by one", starts_block=True, is_causal=True)
        return [*super().token_groups(), codes]
