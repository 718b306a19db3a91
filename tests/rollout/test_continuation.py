"""What is left to draw of a group that was aborted, and what it is with the rest."""

from megappo.rollout.continuation import OpenSample, join_group, open_samples
from megappo.rollout.engine import FinishReason, GenerateRequest, SampledResponse, VersionSpan


def response(tokens: list[int], reason: str, *versions: tuple[int, int]) -> SampledResponse:
    spans = [VersionSpan(version=version, tokens=count) for version, count in versions]
    log_probs = [-0.5 * token for token in tokens]
    return SampledResponse(tokens=tokens, log_probs=log_probs, finish_reason=FinishReason(reason), versions=spans)


def request(*begun: SampledResponse, num_samples: int = 4) -> GenerateRequest:
    return GenerateRequest(group_id=3, prompt_tokens=[9], num_samples=num_samples, begun=list(begun))


def test_a_continued_sample_gets_what_is_left_of_its_tokens_and_others_nothing() -> None:
    begun = request(
        response([4, 5, 6, 7, 8, 9], "abort", (1, 6)),
        response([4, 1], "stop", (1, 2)),
        response([], "abort"),
        response([4] * 10, "abort", (1, 10)),
    )
    assert open_samples(begun, 10) == [
        OpenSample(sample=0, begun=[4, 5, 6, 7, 8, 9], budget=4),
        OpenSample(sample=2, begun=[], budget=10),
    ]
    assert [sample.budget for sample in open_samples(request(num_samples=2), 10)] == [10, 10]


def test_log_probs_and_versions_of_what_was_begun_stay_in_front() -> None:
    group = request(response([4, 5, 6, 7], "abort", (1, 4)), response([4, 1], "stop", (2, 2)), num_samples=2)
    output = join_group(group, {0: response([8, 9, 10], "stop", (2, 3))}, max_new_tokens=10, version_in_use=5)
    assert output.responses == [response([4, 5, 6, 7, 8, 9, 10], "stop", (1, 4), (2, 3)), group.begun[1]]
    assert output.policy_version == 1
    again = join_group(group, {0: response([8], "abort", (1, 0), (1, 1))}, max_new_tokens=10, version_in_use=5)
    assert again.responses[0] == response([4, 5, 6, 7, 8], "abort", (1, 5))


def test_a_sample_aborted_with_its_last_token_ended_by_length() -> None:
    group = request(response([4] * 6, "abort", (1, 6)), response([5] * 10, "abort", (1, 10)), num_samples=2)
    output = join_group(group, {0: response([4] * 4, "abort", (2, 4))}, max_new_tokens=10, version_in_use=5)
    assert [answer.finish_reason for answer in output.responses] == [FinishReason.length] * 2


def test_a_group_without_tokens_has_the_version_in_use() -> None:
    output = join_group(request(num_samples=2), {0: response([], "abort", (5, 0))}, max_new_tokens=10, version_in_use=5)
    assert output.responses == [response([], "abort")] * 2
    assert output.policy_version == 5
