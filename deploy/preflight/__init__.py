"""Would the job run there? The examinations of `kit check`.

It may import the folders of `deploy` up to `plan`.
"""
